"""The timeline of a job's collectives: Trace Event files that open in https://ui.perfetto.dev."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsgd_hpc import env
from qsgd_hpc._notices import warn
from qsgd_hpc.errors import UsageError
from qsgd_hpc.timeline import traces

if TYPE_CHECKING:
    from qsgd_hpc.runtime.basics import Context

__all__ = ["start", "start_from_environment", "stop"]

_RANK = "{rank}"
_TAG = 77  # the engine's messages on this communicator have tags 1 to 4
_ROUNDS = 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _zero_s(comm: Any) -> float:
    """Return the time origin of the job on this rank's ``time.monotonic()``; collective.

    Exact on rank 0's host, whose ranks share a clock. For each other rank, rank 0 requests its time
    20 times and uses the fastest answer, whose error is at most half of its round trip: a few
    microseconds on a cluster's network.

    Args:
        comm: mpi4py communicator; the engine may use it at the same time.
    Returns:
        the origin, in seconds of this rank's monotonic clock.
    Source: Cristian, Probabilistic clock synchronization, Distributed Computing 3, 1989.
    """
    host = _BOOT_ID.read_text() if _BOOT_ID.exists() else str(comm.Get_rank())
    hosts = comm.allgather(host)
    zero: float = comm.bcast(time.monotonic())
    remote = [rank for rank, other in enumerate(hosts) if other != hosts[0]]
    if comm.Get_rank() == 0:
        for rank in remote:
            comm.send(_offset_s(comm, rank), rank, _TAG)
    elif comm.Get_rank() in remote:
        for _ in range(_ROUNDS):
            comm.recv(source=0, tag=_TAG)
            comm.send(time.monotonic(), 0, _TAG)
        zero += comm.recv(source=0, tag=_TAG)
    return zero


def _offset_s(comm: Any, rank: int) -> float:
    """Return the seconds by which the clock of ``rank`` is ahead of this rank's."""
    answers = []
    for _ in range(_ROUNDS):
        sent = time.monotonic()
        comm.send(None, rank, _TAG)
        theirs = comm.recv(source=rank, tag=_TAG)
        received = time.monotonic()
        answers.append((received - sent, theirs - (sent + received) / 2))
    return float(min(answers)[1])


@dataclass(frozen=True)
class Files:
    """The target of a job's timeline.

    Args:
        path: the user's path.
        all_ranks: one file per rank and a merged one; else only rank 0's.
    """

    path: str
    all_ranks: bool

    def of_rank(self, rank: int) -> Path:
        """Return the file that one rank writes."""
        if _RANK in self.path:
            return Path(self.path.replace(_RANK, str(rank)))
        path = Path(self.path)
        return path.with_suffix(f".rank{rank}{path.suffix}") if self.all_ranks else path

    @property
    def merged(self) -> Path:
        """Return the merged file of all ranks."""
        return Path(self.path.replace(_RANK, "all"))


# One engine per process writes at most one timeline.
_files: Files | None = None
# Paths of the environment that this process has used, and how often.
_begun: Counter[str] = Counter()


def start(context: Context, path: str, *, mark_cycles: bool) -> None:
    """Start a timeline; see ``basics.start_timeline``."""
    files = Files(path, _RANK in path or env.get("QSGD_TIMELINE_ALL_RANKS"))
    _start(context, files, mark_cycles, together=files.all_ranks)


def start_from_environment(context: Context) -> None:
    """Start the timeline that rank 0's environment requests; collective.

    Each further engine of a process, as after a failure that elastic training survives, has a file
    of its own: ``t.json``, ``t.2.json``, ...
    """
    path, all_ranks, mark_cycles = context.comm.bcast(
        (
            _unused(env.get("QSGD_TIMELINE")),
            env.get("QSGD_TIMELINE_ALL_RANKS"),
            env.get("HOROVOD_TIMELINE_MARK_CYCLES"),
        )
    )
    if path is not None:
        _start(context, Files(path, _RANK in path or all_ranks), mark_cycles, together=True)


def _unused(path: str | None) -> str | None:
    """Return the path for the next engine of this process."""
    if path is None:
        return None
    _begun[path] += 1
    own = Path(path)
    return path if _begun[path] == 1 else str(own.with_suffix(f".{_begun[path]}{own.suffix}"))


def _start(context: Context, files: Files, mark_cycles: bool, together: bool) -> None:
    """Start on this rank; with ``together``, all ranks raise an error of any of them."""
    global _files
    writes = files.all_ranks or context.rank == 0
    zero = {"zero_s": _zero_s(context.comm)} if files.all_ranks else {}
    path = files.of_rank(context.rank)
    fault = _try_start(context.engine, path, mark_cycles, zero) if writes else None
    faults = context.comm.allgather(fault) if together else [fault]
    worst = next((text for text in faults if text is not None), None)
    if worst is None:
        _files = files if writes else None
        return
    if writes and fault is None:
        context.engine.stop_timeline()
    raise UsageError(worst)


def _try_start(engine: Any, path: Path, mark_cycles: bool, more: dict[str, float]) -> str | None:
    try:
        engine.start_timeline(path=str(path), mark_cycles=mark_cycles, **more)
    except UsageError as error:
        return str(error)
    return None


def stop(context: Context, *, together: bool = True) -> None:
    """Finish this rank's file and, with ``together`` (then collective), write the merged one."""
    global _files
    ended, _files = _files, None
    if ended is None:
        return
    context.engine.stop_timeline()
    if not (ended.all_ranks and together):
        return
    context.comm.Barrier()  # until all files are complete
    if context.rank == 0:
        _merge_visible(ended, context.size)


def _merge_visible(files: Files, size: int) -> None:
    paths = [files.of_rank(rank) for rank in range(size)]
    seen = [path for path in paths if path.exists()]
    try:
        traces.merge(seen, files.merged)
    except (OSError, UsageError) as error:
        return warn(f"the ranks' timelines were not merged: {error}")
    if len(seen) < size:
        warn(
            f"{files.merged} holds {len(seen)} of {size} ranks: the other files are on other "
            "hosts; copy them here and run qsgd-hpc timeline merge"
        )
