"""The rendezvous of torch.distributed's ranks, and torchrun's variables, for all launchers.

Values that all ranks share are determined here, before the ranks start; the supervisor of each rank
sets the rank's own values (supervise.py). The port is reserved on the first rank's host: it is
bound, but nothing listens on it, so that the kernel does not assign it to others that request a
free port. torch's store can still listen there, because both set SO_REUSEADDR.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from qsgd_hpc.launch.claims import OF_ONE_RANK
from qsgd_hpc.launch.hold_port import held_port
from qsgd_hpc.launch.options import RunOptions, local_ranks, placement
from qsgd_hpc.launch.schedulers import NODE_FILES, in_batch_job

__all__ = ["Rendezvous", "remarks", "rendezvous", "starter", "taken_port", "without_outer_launch"]

_RUN_ID = "TORCHELASTIC_RUN_ID"
_OF_TORCHRUN = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|NODE_RANK"
    r"|ROLE_(RANK|NAME|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
)
_LOOPBACKS = ("localhost", "127.0.0.1", "::1")
# Below the ports that the kernel assigns automatically.
_FIRST_PORT, _PORTS = 20_000, 12_000
_ON_EMULATED_HOST = 29_500  # torch's default; emulated hosts have no other processes
_STARTERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate",
             "deepspeed")  # fmt: skip


@dataclass(frozen=True)
class Rendezvous:
    """Values that all ranks of one launch share.

    Attributes:
        run_id: a unique identifier of this launch.
        address, port: the address of the first rank's host.
        held: whether the launcher reserves the port; else the first rank's supervisor does.
        counts: number of ranks on each node, in the order of ranks; () if the launcher decides.
    """

    run_id: str
    address: str
    port: int
    held: bool
    counts: tuple[int, ...]

    @property
    def word(self) -> str:
        """The command-line argument for the supervisors."""
        return f"{self.run_id},{0 if self.held else self.port},{'+'.join(map(str, self.counts))}"


def without_outer_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of the launch that has started this process as a rank.

    Ranks that such a process starts have numbers of their own, and meet elsewhere: at the outer
    launch's MASTER_PORT, they would find its ranks. Without TORCHELASTIC_RUN_ID, the user has set
    MASTER_PORT.
    """
    kept = {name: value for name, value in environ.items() if not OF_ONE_RANK.fullmatch(name)}
    if _RUN_ID not in environ:
        return kept
    return {name: value for name, value in kept.items() if not _OF_TORCHRUN.fullmatch(name)}


@contextlib.contextmanager
def rendezvous(options: RunOptions, environ: Mapping[str, str]) -> Iterator[Rendezvous | None]:
    """Yield the rendezvous of the ranks; reserve its port if it is on this host.

    Yields None if torchrun's variables are not to be set.
    """
    if not options.sets_torchrun:
        yield None
        return
    address, here = _address(options, environ)
    run_id = secrets.token_hex(4)
    if options.network is not None:
        port, here = _ON_EMULATED_HOST, False
    else:
        port = _FIRST_PORT + int(run_id, 16) % _PORTS
    counts = _counts(options, environ)
    if not here:
        yield Rendezvous(run_id, address, port, False, counts)
        return
    with held_port() as holder:
        yield Rendezvous(run_id, address, holder.getsockname()[1], True, counts)


def _address(options: RunOptions, environ: Mapping[str, str]) -> tuple[str, bool]:
    """Return the address of the first rank's host, and whether it is this host."""
    if options.nodes:
        (name, _), *others = placement(options)
        if others and name in _LOOPBACKS:
            name = socket.gethostname()  # a name that other hosts can reach
    elif in_batch_job(environ):
        name = _first_node(environ)
    else:
        return "127.0.0.1", True
    own, short = (host.partition(".")[0] for host in (socket.gethostname(), name))
    return name, name in _LOOPBACKS or short == own


def _first_node(environ: Mapping[str, str]) -> str:
    """Return the first node of the current batch job."""
    for name in NODE_FILES:
        with contextlib.suppress(OSError, IndexError):
            return Path(environ.get(name, "")).read_text().split()[0]
    listed = re.match(r"([^\[,]+)(?:\[(\d+))?", environ.get("SLURM_JOB_NODELIST", ""))
    return f"{listed[1]}{listed[2] or ''}" if listed else socket.gethostname()


def _counts(options: RunOptions, environ: Mapping[str, str]) -> tuple[int, ...]:
    if options.nodes:
        return tuple(count for _, count in placement(options))
    each = options.ranks_per_node or options.ranks
    if options.ranks_per_node is None and in_batch_job(environ):
        return ()
    full, rest = divmod(options.ranks, each)
    return (each,) * full + ((rest,) if rest else ())


def taken_port(environ: Mapping[str, str]) -> str | None:
    """Return an error if another process on this host uses MASTER_PORT, else None."""
    address, port = environ.get("MASTER_ADDR", "localhost"), environ.get("MASTER_PORT", "")
    if not port.isdecimal() or address not in (*_LOOPBACKS, socket.gethostname()):
        return None
    try:
        held_port(int(port)).close()
    except (OSError, OverflowError) as error:
        return f"MASTER_PORT={port} is not available on this host: {error}"
    return None


def remarks(options: RunOptions, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield remarks for users of torch.distributed, one line each."""
    if not options.sets_torchrun:
        return
    given = environ.get("WORLD_SIZE", str(options.ranks))
    if given != str(options.ranks):
        yield (
            f"WORLD_SIZE={given} was set before; the ranks get {options.ranks}, the value of -np"
        )
    if options.network is None and (taken := taken_port(environ)) is not None:
        yield f"{taken}. Unset it, and the run reserves a port"
    if (program := starter(options.command)) and local_ranks(options) > 1:
        yield (
            f"{program} would start processes itself, on each of these ranks. Remove it: "
            f"`qsgd-hpc run -np {options.ranks} SCRIPT` sets what torchrun sets"
        )


def starter(command: Sequence[str]) -> str | None:
    """Return the program of a command that starts ranks itself, such as torchrun."""
    program, *words = [PurePath(word).name for word in command[:3]]
    if program.startswith("python") and words:
        program = words[-1] if words[0] == "-m" else words[0]
    return program if program in _STARTERS else None
