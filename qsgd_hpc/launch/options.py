"""The user's options, and the placement of the ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
    "parse_hostfile",
    "parse_hosts",
    "placement",
    "tells_of_torchrun",
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


def tells_of_torchrun(torchrun: bool | None, horovod: bool) -> bool:
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
        return tells_of_torchrun(self.torchrun, self.horovod)

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
    """Parse ``h1:2,h2:2``; a host without a number has one slot.

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
    return tuple(hosts)


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
    slots: dict[str, int] = {}
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
            slots[host.name] = slots.get(host.name, 0) + host.slots
        except ValueError:
            faults.append(f"--hostfile {path}, line {number}: {line.strip()!r} is not HOST slots=N")
    if not slots and not faults:
        faults.append(f"--hostfile {path}: it contains no host")
    if faults:
        raise UsageError("\n".join(faults))
    return tuple(Host(name, count) for name, count in slots.items())


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
