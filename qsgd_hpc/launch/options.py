"""The user's options and command, checked, and the placement of the ranks."""

from __future__ import annotations

import base64
import difflib
import os
import shutil
import socket
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.cluster.network import MOST_HOSTS, Network, host_names, hosts_needed
from qsgd_hpc.rules import AUTO_BITS, PLAIN_BITS

__all__ = [
    "BITS",
    "CHOICES_OF_BITS",
    "Host",
    "RunOptions",
    "bits_variables",
    "check_options",
    "chosen_hosts",
    "is_choice_of_bits",
    "local_ranks",
    "notebook_fault",
    "parse_hostfile",
    "parse_hosts",
    "placement",
    "resolve_command",
    "stdin_program_at",
    "wants_torchrun",
    "with_program",
]

BITS = (*range(1, 9), PLAIN_BITS)
CHOICES_OF_BITS = "choose 1 to 8, 32 (plain float32) or auto"
_RANK_BYTES = 20 << 20  # of a rank that has loaded Python and its launcher's process alone


def is_choice_of_bits(bits: int | str) -> bool:
    """Return whether a value is valid for QSGD_BITS."""
    return bits in (*BITS, AUTO_BITS)


def bits_variables(bits: int | str | None, weight_bits: int | None) -> dict[str, str]:
    """Return the variables for bits; None leaves the environment's values."""
    given = {"QSGD_BITS": bits, "QSGD_WEIGHT_BITS": weight_bits}
    return {name: str(value) for name, value in given.items() if value is not None}


def wants_torchrun(torchrun: bool | None, horovod: bool) -> bool:
    """Return whether torchrun's variables are set for the ranks; None: not specified.

    Some Horovod scripts use torch.distributed if these are set.
    """
    return not horovod if torchrun is None else torchrun


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks that may run on it."""

    name: str
    slots: int


@dataclass(frozen=True)
class RunOptions:
    """One ``qsgd-hpc run``.

    Args:
        ranks: number of ranks to start.
        command: the program and its arguments.
        hosts: the hosts; empty: this machine, or the nodes of the batch job.
        bits: QSGD_BITS for the ranks; None leaves the environment's.
        weight_bits: QSGD_WEIGHT_BITS for the ranks, likewise.
        ranks_per_node: with a network, ranks on each host, default 1; without one, the
            number of consecutive ranks that form a node.
        network: start the ranks on emulated hosts on this machine, joined by this network.
        prefix_output: put ``[rank] `` before every line.
        env: variables for the ranks, which override inherited ones.
        mpi_args: additional arguments for mpiexec.
        network_interfaces: the network interfaces to use; empty: MPI's choice.
        horovod: let ``import horovod`` mean this package in the ranks.
        torchrun: set torchrun's variables (RANK, MASTER_ADDR, ...); None: only if ``horovod`` is
            False, because Horovod scripts may use torch.distributed if these are set.
        output_folder: folder for a copy of each rank's output: rank.N/stdout, rank.N/stderr.
        timestamps: put date and time before every line.
        start_timeout_s: time limit for the start of the ranks; None: no limit.
        verbose: print the MPI and the mpiexec in use.
    """

    ranks: int
    command: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    bits: int | str | None = None
    weight_bits: int | None = None
    ranks_per_node: int | None = None
    network: Network | None = None
    prefix_output: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    mpi_args: tuple[str, ...] = ()
    network_interfaces: tuple[str, ...] = ()
    horovod: bool = False
    torchrun: bool | None = None
    output_folder: Path | None = None
    timestamps: bool = False
    start_timeout_s: float | None = None
    verbose: bool = False

    @property
    def sets_torchrun(self) -> bool:
        """Whether torchrun's variables are set for the ranks."""
        return wants_torchrun(self.torchrun, self.horovod)

    @property
    def nodes(self) -> tuple[Host, ...]:
        """The hosts of the ranks: the given ones, or those of the network."""
        if self.network is None:
            return self.hosts
        each = self.ranks_per_node or 1
        return tuple(Host(name, each) for name in host_names(hosts_needed(self.ranks, each)))


def chosen_hosts(hosts: str | None, hostfile: Path | None) -> tuple[Host, ...]:
    """Return the hosts of a text or of a file; none if neither is given.

    Raises:
        UsageError: both are given, or the one that is given is malformed.
    """
    if hosts is not None and hostfile is not None:
        raise UsageError("-H and --hostfile exclude each other; give one")
    if hosts is not None:
        return parse_hosts(hosts)
    return () if hostfile is None else parse_hostfile(hostfile)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse ``h1:2,h2:2``; a host without a number has one slot, and each repetition adds slots.

    Raises:
        UsageError: every malformed entry, one per line.
    """
    faults: list[str] = []
    hosts: list[Host] = []
    for entry in text.split(","):
        name, colon, slots = entry.strip().rpartition(":")
        if not colon:
            name, slots = slots, "1"
        if not name or not slots.isdecimal() or int(slots) < 1:
            faults.append(f"-H {text}: {entry!r} is not HOST or HOST:SLOTS with at least 1 slot")
        else:
            hosts.append(Host(name, int(slots)))
    if faults:
        raise UsageError("\n".join(faults))
    return _merged(hosts)


def _merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return each host once, in the order of first appearance, with the sum of its slots."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def parse_hostfile(path: Path) -> tuple[Host, ...]:
    """Read hosts, one per line: ``h``, ``h:2`` or ``h slots=2``; # begins a comment.

    Each repetition of a host (as in PBS_NODEFILE) adds a slot.

    Raises:
        UsageError: the file cannot be read, is empty, or has malformed lines (each named).
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"--hostfile {path}: {reason}") from None
    hosts: list[Host] = []
    faults: list[str] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        entry = words[0]
        if len(words) == 2 and words[1].startswith("slots="):
            entry = f"{words[0]}:{words[1].removeprefix('slots=')}"
        elif len(words) > 1:
            faults.append(f"--hostfile {path}, line {number}: {line.strip()!r} is not HOST slots=N")
            continue
        try:
            (host,) = parse_hosts(entry)
            hosts.append(host)
        except ValueError:
            faults.append(f"--hostfile {path}, line {number}: {line.strip()!r} is not HOST slots=N")
    if not hosts and not faults:
        faults.append(f"--hostfile {path}: it contains no host")
    if faults:
        raise UsageError("\n".join(faults))
    return _merged(hosts)


def check_options(options: RunOptions) -> list[str]:
    """Return all errors of the request; resolving host names is the only I/O."""
    faults = []
    if options.ranks < 1:
        faults.append(f"-np {options.ranks}: at least 1 rank must run")
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = max(1, memory_bytes // _RANK_BYTES)
    if options.ranks > most and not options.hosts:
        faults.append(
            f"-np {options.ranks}: the memory of this machine is enough for {most} ranks at most; "
            "lower -np, or name hosts by -H"
        )
    if options.bits is not None and not is_choice_of_bits(options.bits):
        faults.append(f"--bits {options.bits}: {CHOICES_OF_BITS}")
    if options.ranks_per_node is not None and options.ranks_per_node < 1:
        faults.append(f"--ranks-per-node {options.ranks_per_node}: must be at least 1")
    if options.start_timeout_s is not None and not options.start_timeout_s > 0:
        faults.append(f"--start-timeout {options.start_timeout_s:g}: must be above 0 seconds")
    faults += _network_faults(options)
    slots = sum(host.slots for host in options.hosts)
    if options.hosts and slots < options.ranks:
        each = -(-options.ranks // len(options.hosts))
        names = ",".join(f"{host.name}:{each}" for host in options.hosts)
        faults.append(
            f"-np {options.ranks} needs {options.ranks} slots, the hosts have {slots}; lower "
            f"-np, or use -H {names}"
        )
    for host in options.hosts if options.network is None else ():
        try:
            socket.getaddrinfo(host.name, None)
        except (OSError, UnicodeError):
            faults.append(f"host {host.name!r} cannot be resolved; check its spelling in -H")
    return faults


def _network_faults(options: RunOptions) -> list[str]:
    if options.network is None:
        return []
    faults = []
    own = f"--network {options.network.text}: its hosts are emulated on this machine"
    if options.hosts:
        faults.append(f"{own}; remove -H and --hostfile, or remove --network")
    if options.network_interfaces:
        faults.append(f"{own} and have one interface; remove --network-interfaces")
    each = options.ranks_per_node or 1
    if each >= 1 and (count := hosts_needed(options.ranks, each)) > MOST_HOSTS:
        least = hosts_needed(options.ranks, MOST_HOSTS)
        faults.append(
            f"--network {options.network.text}: -np {options.ranks} needs {count} hosts, but "
            f"there are addresses for {MOST_HOSTS}; use --ranks-per-node {least} or more"
        )
    return faults


def placement(options: RunOptions) -> list[tuple[str, int]]:
    """Return hosts with their numbers of ranks, filled in order; without unused hosts."""
    left, placed = options.ranks, []
    for host in options.nodes:
        count = min(left, host.slots)
        left -= count
        if count:
            placed.append((host.name, count))
    return placed


def local_ranks(options: RunOptions) -> int:
    """Return the largest number of ranks on a host."""
    return max((count for _, count in placement(options)), default=options.ranks)


_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})


def resolve_command(
    command: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the command, with this ``python`` before a bare script, after checking its files.

    Like torchrun, this ignores a shebang that names Python, because ``env python3`` finds another
    one if no environment is activated. An executable script may name another program, such as uv.

    Raises:
        UsageError: no command, or the program or script does not exist (with similar names).
    """
    environ = os.environ if environ is None else environ
    if not command:
        raise UsageError("no command given; for example: qsgd-hpc run -np 2 python train.py")
    program, *rest = command
    if program.endswith(".py"):
        _check_script(Path(program))
        return tuple(command) if _names_its_program(program) else (sys.executable, *command)
    found = shutil.which(program, path=environ.get("PATH", os.defpath))
    if found is None:
        raise UsageError(_unknown_program(program, environ))
    name = Path(program).name
    if name.startswith("python"):
        kind, at = _source_of(rest)
        if kind == "script":
            _check_script(Path(rest[at]))
    elif name in _SHELLS and (not rest or rest[0] in ("-", "-s")):
        raise UsageError(
            f"{' '.join(command)!r} reads its commands from stdin, which ranks do not have. "
            "Write them to a file and use that file"
        )
    return tuple(command)


def _names_its_program(script: str) -> bool:
    """Return whether a script's shebang applies: it is executable and names another than Python."""
    if os.sep not in script or not os.access(script, os.X_OK) or Path(script).is_dir():
        return False
    with Path(script).open("rb") as file:
        line = file.readline(256)
    words = [Path(word).name for word in os.fsdecode(line[2:]).split()]
    program = next((word for word in words if word != "env" and not word.startswith("-")), "")
    return line.startswith(b"#!") and program != "" and not program.startswith("python")


def stdin_program_at(command: Sequence[str]) -> int | None:
    """Return the position of Python's ``-`` in a command; None if Python reads a file.

    Python may be started by another program (``numactl -N 0 python -``); the ``-`` is then
    required.
    """
    for start, word in enumerate(command):
        if Path(word).name.startswith("python"):
            kind, at = _source_of(command[start + 1 :])
            at += start + 1
            if kind == "stdin" and (start == 0 or at < len(command)):
                return at
            return None
    return None


def _source_of(arguments: Sequence[str]) -> tuple[str, int]:
    """Return the kind of Python's program, and its position in the arguments.

    ``script``; ``stdin`` ("-", or no argument); ``other`` for -c, -m, --version and the like.
    """
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "-":
        word = arguments[at]
        # Among combined letters, W and X have a value: the rest of the word, or the next word.
        value = next((i for i, letter in enumerate(word) if letter in "WX"), len(word))
        if word == "--check-hash-based-pycs" or value == len(word) - 1:
            at += 1
        elif word.startswith("--") or set(word[1:value]) & set("cmVh?"):
            return "other", at
        at += 1
    stdin = at >= len(arguments) or arguments[at] == "-"
    return "stdin" if stdin else "script", min(at, len(arguments))


def notebook_fault(path: Path) -> str:
    """Return what is wrong with a notebook as a script, and the remedy; "" for other files."""
    if path.suffix != ".ipynb":
        return ""
    return f"{path}: a notebook. Write its code to a script: jupyter nbconvert --to script {path}"


def _check_script(path: Path) -> None:
    if fault := notebook_fault(path):
        raise UsageError(fault)
    if path.is_file() or (path.is_dir() and (path / "__main__.py").is_file()):
        return
    if path.is_dir():
        raise UsageError(f"{path} is a folder without __main__.py; use the script in it")
    folder = path.parent
    names = [p.name for p in folder.iterdir() if p.is_file()] if folder.is_dir() else []
    where = f"in {folder.resolve()}" if folder.is_dir() else f"there is no folder {folder}"
    raise UsageError(f"script {str(path)!r} does not exist ({where}){_near(path.name, names)}")


def _unknown_program(program: str, environ: Mapping[str, str]) -> str:
    if os.sep in program:
        path = Path(program)
        if path.is_dir():
            return f"{program} is a folder, not a program"
        if path.exists():
            unusable = f"{program} is not executable; use chmod +x, or add its interpreter"
            return notebook_fault(path) or unusable
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        return f"program {program!r} does not exist{_near(path.name, names)}"
    names = []
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        if folder and Path(folder).is_dir():
            names += [entry.name for entry in Path(folder).iterdir()]
    return f"program {program!r} is not in PATH{_near(program, names)}"


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, sorted(set(names)), n=2)
    return f". Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


MOST_BYTES = 120_000  # the kernel's limit for one argument is 128 KiB
_RUN = (
    "__import__('sys').argv[0]='-';exec(compile(__import__('zlib').decompress("
    "__import__('base64').b64decode('{}')),'<stdin>','exec',dont_inherit=True))"
)


def with_program(command: Sequence[str], at: int, stdin: BinaryIO | None) -> tuple[str, ...]:
    """Return a Python command that contains the program that it would read from stdin.

    Args:
        command: the user's command.
        at: the position of ``-``, given or implied.
        stdin: this process's stdin; None if it has none.

    Raises:
        UsageError: stdin contains no program, or one that is too long.
    """
    remedy = "Write the program to a file that every rank can read, and use that file"
    text_of_command = " ".join(command)
    if stdin is not None and stdin.isatty():
        raise UsageError(
            f"{text_of_command!r} reads its program from stdin, and that is a terminal. {remedy}"
        )
    text = b"" if stdin is None else stdin.read()
    if not text.strip():
        raise UsageError(
            f"{text_of_command!r} reads its program from stdin, and there is none. {remedy}"
        )
    code = _RUN.format(base64.b64encode(zlib.compress(text, 9)).decode("ascii"))
    if len(code) > MOST_BYTES:
        raise UsageError(
            f"the program on stdin has {len(text):,} bytes, packed {len(code):,}; at most "
            f"{MOST_BYTES:,} can be sent to the ranks. {remedy}"
        )
    return (*command[:at], "-c", code, *command[at + 1 :])
