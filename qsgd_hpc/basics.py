"""Rank facts, init and shutdown: what every framework module shares.

One context per process. ``init`` and ``shutdown`` may follow each other any number of times.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from qsgd_hpc import _lifeline, _mpi, env
from qsgd_hpc.errors import RankFailedError, UsageError

__all__ = [
    "Context",
    "communication_stats",
    "context",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_library_version",
    "rank",
    "shutdown",
    "size",
]

# How long after another rank's death this process may go on without noticing; the job is to have
# ended within 30 s.
GRACE_S = 20.0


@dataclass(frozen=True)
class Context:
    """What ``init`` found and built."""

    engine: Any
    """qsgd_hpc._core.Engine."""
    comm: Any
    """This package's own duplicate of the communicator (mpi4py)."""
    mpi: _mpi.Mpi
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    counters: Counter[str] = field(default_factory=Counter)
    """How many unnamed things of each kind there were; equal on ranks that call alike."""


_context: Context | None = None
_lock = threading.Lock()
_at_exit = False
_owner_pid = 0  # who called init; a forked child inherits the context but not its threads
# Contexts of jobs that lost a rank. They are never freed: MPI may still write to their memory, and
# it cannot be finalised.
_wrecks: list[Context] = []
# After an error of its own, a rank waits so long for the others to notice before it ends the job.
_PATIENCE_S = 5.0
_REASON_BYTES = 1000
_config_variables = (
    "QSGD_BITS",
    "QSGD_BUCKET_SIZE",
    "QSGD_NORM",
    "QSGD_MIN_ELEMENTS",
    "QSGD_SEED",
    "QSGD_NONFINITE",
    "QSGD_RANKS_PER_NODE",
    "QSGD_LIFELINE",
    "QSGD_FUSION_BYTES",
    "QSGD_STALL_WARNING_S",
)


def init(comm: Any = None) -> None:
    """Start the engine; harmless when it runs already.

    Args:
        comm: an mpi4py communicator; default is all ranks that the launcher started.

    Raises:
        UsageError: no usable MPI, or a QSGD_* variable that is wrong or differs between ranks.
    """
    global _context, _at_exit, _owner_pid
    with _lock:
        if _context is not None:
            return
        if _wrecks:
            raise RankFailedError(
                "a rank of this job has died, so its MPI cannot be used again; end this process "
                "and start the job from its last checkpoint"
            )
        if comm is not None and not hasattr(comm, "Dup"):
            raise UsageError(
                f"init(comm={comm!r}): pass an mpi4py communicator, such as MPI.COMM_WORLD.Split()"
            )
        settings = {name: env.get(name) for name in _config_variables}
        mpi = _mpi.start_mpi()
        own = (mpi.module.COMM_WORLD if comm is None else comm).Dup()
        own.Set_errhandler(mpi.module.ERRORS_RETURN)
        _require_equal(own, settings)
        _context = _build(mpi, own, settings)
        _owner_pid = os.getpid()
        if not _at_exit:
            atexit.register(_leave)
            _at_exit = True


def _require_equal(comm: Any, settings: dict[str, Any]) -> None:
    """Raise on every rank when the ranks' settings differ: they would not understand each other."""
    everyone = comm.allgather(settings)
    faults = []
    for name in settings:
        for other, theirs in enumerate(everyone):
            if theirs[name] != everyone[0][name]:
                faults.append(
                    f"{name} is {theirs[name]} on rank {other} and {everyone[0][name]} on rank 0. "
                    "Set it for all ranks: qsgd-hpc run --env passes a variable to every host."
                )
                break
    if faults:
        comm.Free()
        raise UsageError("\n".join(faults))


def _build(mpi: _mpi.Mpi, comm: Any, settings: dict[str, Any]) -> Context:
    import qsgd_hpc._core as _core

    module = mpi.module
    rank, size = comm.Get_rank(), comm.Get_size()
    nodes = _mpi.split_nodes(mpi, comm, settings["QSGD_RANKS_PER_NODE"])
    peers = _lifeline.connect(comm) if settings["QSGD_LIFELINE"] else []
    facts = _core.MpiFacts(
        module_path=module.__file__,
        library=mpi.library,
        pointer_handles=mpi.pointer_handles,
        comm=module._handleof(comm),
        byte_type=module._handleof(module.BYTE),
        rank=rank,
        size=size,
    )
    config = _core.EngineConfig(
        seed=settings["QSGD_SEED"],
        fusion_bytes=settings["QSGD_FUSION_BYTES"],
        nonfinite=settings["QSGD_NONFINITE"],
        stall_warning_s=settings["QSGD_STALL_WARNING_S"],
        log=_warn,
    )
    engine = _core.Engine.over_mpi(facts, config)
    if peers:
        engine.watch(peers, GRACE_S)
    return Context(engine, comm, mpi, rank, size, *nodes)


def _warn(text: str) -> None:
    print(f"qsgd-hpc: warning: {text}", file=sys.stderr, flush=True)


def shutdown() -> None:
    """Leave the job; returns when every rank has left. Harmless when not initialised."""
    _shut_down("it called shutdown()", patience_s=1e9)


def _shut_down(reason: str, patience_s: float) -> None:
    global _context
    with _lock:
        if _context is None:
            return
        ended, _context = _context, None
    ended.engine.shutdown(reason, patience_s)
    _lifeline.forget()
    if ended.engine.aborted():
        _wrecks.append(ended)
    else:
        ended.comm.Free()


def _leave() -> None:
    """At exit: leave the job and finalise MPI, or skip MPI when another rank is dead."""
    failure = getattr(sys, "last_value", None)
    if os.getpid() != _owner_pid:
        return
    reason = f"it ended with {type(failure).__name__}: {failure}" if failure else "its script ended"
    # An error may quote a file name that is not UTF-8, or a whole file.
    reason = reason.encode("utf-8", "replace")[:_REASON_BYTES].decode("utf-8", "ignore")
    _shut_down(reason, _PATIENCE_S if failure else 1e9)
    mpi4py = sys.modules["mpi4py"]
    if mpi4py.rc.finalize is not False:
        # The script imported mpi4py first, so mpi4py finalises MPI when the interpreter has gone;
        # with a dead rank it would wait for ever.
        if _wrecks:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
    elif not _wrecks:
        module = sys.modules["mpi4py.MPI"]
        if not module.Is_finalized():
            module.Finalize()


def is_initialized() -> bool:
    """Tell whether ``init`` has been called and ``shutdown`` has not."""
    return _context is not None


def context() -> Context:
    """Return the running context.

    Raises:
        UsageError: ``init`` has not been called.
    """
    if _context is None:
        raise UsageError("qsgd_hpc is not initialised on this rank; call hvd.init() first")
    if os.getpid() != _owner_pid:
        raise UsageError(
            f"process {os.getpid()} was forked from rank {_context.rank} after hvd.init() and "
            "cannot communicate; call hvd in the rank itself, not in a data loader's worker"
        )
    return _context


def next_number(kind: str) -> int:
    """Return 0, 1, 2, ... for each kind of unnamed thing, from 0 again after ``init``."""
    counters = context().counters
    counters[kind] += 1
    return counters[kind] - 1


def rank() -> int:
    """Return this process's number among all, from 0."""
    return context().rank


def size() -> int:
    """Return the number of processes of the job."""
    return context().size


def local_rank() -> int:
    """Return this process's number on its node, from 0: the GPU to take."""
    return context().local_rank


def local_size() -> int:
    """Return the number of processes on this node."""
    return context().local_size


def cross_rank() -> int:
    """Return this node's number among the nodes that have a process of this local rank."""
    return context().cross_rank


def cross_size() -> int:
    """Return the number of nodes that have a process of this local rank."""
    return context().cross_size


def mpi_library_version() -> str:
    """Return the name and version of the MPI in use."""
    return context().mpi.library


def communication_stats() -> dict[str, float]:
    """Return what this rank has communicated since ``init``.

    Returns:
        wire_bytes: bytes this rank sent, control messages included;
        gradient_bytes: bytes of the tensors it had reduced, before compression;
        allreduces: number of those tensors; fused_reductions: reductions that carried them;
        comm_time_s: seconds its engine spent in collectives (it may overlap with computing).
    """
    stats: dict[str, float] = context().engine.stats()
    return stats
