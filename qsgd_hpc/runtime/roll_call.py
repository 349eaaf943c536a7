"""Report which ranks have not called ``init``, while the others wait for them inside MPI.

The position of a rank in its launch is known before MPI is initialised.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from qsgd_hpc.launch.claims import claims
from qsgd_hpc.launch.place import LAUNCHERS
from qsgd_hpc.launch.supervise import slurm_tasks_here
from qsgd_hpc.runtime.job_settings import Settings, is_logged

__all__ = ["seat_of", "waiting"]


@contextlib.contextmanager
def waiting(settings: Settings, *, every_rank: bool) -> Iterator[None]:
    """Return a context in which missing ranks of the launch are reported.

    Args:
        settings: of the job; QSGD_STALL_WARNING_S and QSGD_STALL_SHUTDOWN_S also limit this wait.
        every_rank: whether all ranks of the launch must call ``init``; if not, nothing is reported.
    """
    seat = seat_of(os.environ) if every_rank else None
    warning_s = settings["QSGD_STALL_WARNING_S"] if is_logged("warning") else 0.0
    shutdown_s = settings["QSGD_STALL_SHUTDOWN_S"]
    if seat is None or seat.ranks < 2 or not (warning_s or shutdown_s):
        yield
        return
    # The core's thread needs no GIL, which MPI_Init holds while it waits.
    import qsgd_hpc._core as _core

    watch = _core.RollCall(
        host=socket.gethostname(), warning_s=warning_s, shutdown_s=shutdown_s, **asdict(seat)
    )
    try:
        yield
    finally:
        watch.end()


# Programs that start ranks on a host and are ancestors of all ranks there. They identify the launch
# if no variable of the launcher does.
_PROXIES = frozenset({"hydra_pmi_proxy", "pmi_proxy", "prted", "prterun", "orted", "mpirun"})


@dataclass(frozen=True)
class Seat:
    """The position of a rank in its launch.

    Attributes:
        launch: identifier shared by the ranks of this launch on this host, and no others.
        rank, ranks: rank and number of ranks in the launch.
        local_rank, local_size: rank and number of ranks on this host.
    """

    launch: str
    rank: int
    ranks: int
    local_rank: int
    local_size: int


def seat_of(environ: Mapping[str, str]) -> Seat | None:
    """Return this process's seat from its launcher's variables; None if any of them is missing.

    The batch script of a Slurm job has no seat, although Slurm sets its rank: it is in no step.
    """
    ranks = next((claim.ranks for claim in claims(environ) if claim.exact), None)
    launch = _launch(environ) if ranks else None
    tasks = slurm_tasks_here(dict(environ))
    for local_rank, rank, local_size, _ in LAUNCHERS.values():
        sizes = environ.get(local_size) or ("" if tasks is None else str(tasks))
        numbers = [environ.get(rank, ""), environ.get(local_rank, ""), sizes]
        if ranks and launch and all(text.isdigit() for text in numbers):
            own, local, size = map(int, numbers)
            return Seat(launch, own, ranks, local, size)
    return None


def _launch(environ: Mapping[str, str]) -> str | None:
    """Return an identifier of this launch on this host; None if there is none."""
    for name in ("PMIX_NAMESPACE", "PALS_APID"):
        if environ.get(name):
            return _digest(environ[name])
    if "MPI_LOCALRANKID" not in environ and environ.get("SLURM_STEP_ID"):
        return _digest(environ.get("SLURM_JOB_ID", ""), environ["SLURM_STEP_ID"])
    proxy = _proxy()
    return None if proxy is None else _digest(*proxy)


def _digest(*parts: str) -> str:
    text = "\n".join((socket.gethostname(), str(os.getuid()), *parts))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _proxy() -> tuple[str, str] | None:
    """Return pid and start time of the nearest ancestor that starts ranks."""
    pid = os.getppid()
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/stat").read_text("utf-8", "surrogateescape")
        except OSError:
            return None
        # The name is in parentheses and may contain any character.
        name, fields = text[text.index("(") + 1 : text.rindex(")")], text.rsplit(")", 1)[1].split()
        if name in _PROXIES:
            return str(pid), fields[19]
        pid = int(fields[1])
    return None
