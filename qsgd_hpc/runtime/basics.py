"""Rank facts, init and shutdown: what every framework module shares.

One context per process. ``init`` and ``shutdown`` may follow each other any number of times.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from qsgd_hpc import env
from qsgd_hpc.errors import RankFailedError, UsageError
from qsgd_hpc.runtime import autotune, job, job_settings, lifeline, mpi_binding, planning, roll_call
from qsgd_hpc.timeline import writing

if TYPE_CHECKING:
    from qsgd_hpc.runtime.process_sets import ProcessSet

__all__ = [
    "Context",
    "communication_stats",
    "compression_stats",
    "context",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_library_version",
    "rank",
    "restart",
    "shutdown",
    "size",
    "start_timeline",
    "step_profile",
    "stop_timeline",
]

# How long this process may run after another rank's death without noticing it; the job is to have
# ended within 30 s.
GRACE_S = 20.0


@dataclass(frozen=True)
class Context:
    """The state that ``init`` creates."""

    engine: Any
    """qsgd_hpc._core.Engine."""
    comm: Any
    """A duplicate of the communicator for this package (mpi4py)."""
    window: Any
    """The MPI window of the memory that the ranks of this node share, or None."""
    mpi: mpi_binding.Mpi
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool
    """Whether every node has equally many ranks."""
    dynamic_process_sets: bool
    """Whether process sets can be added and removed."""
    process_sets: dict[int, ProcessSet] = field(default_factory=dict)
    """Registered sets by number, except that of all ranks, which is 0."""
    counters: Counter[str] = field(default_factory=Counter)
    """Number of unnamed operations of each kind; equal on ranks that make equal calls."""


_context: Context | None = None
_lock = threading.Lock()
_at_exit = False
_arguments: tuple[Any, Any] = (None, None)  # of the last init
_owner_pid = 0  # the process that called init; a forked child has the context, but not its threads
# Contexts of jobs that lost a rank. They are never freed: MPI may still write to their memory, and
# it cannot be finalised.
_wrecks: list[Context] = []
# After an error, a rank waits this long for the others to notice it before it ends the job.
_PATIENCE_S = 5.0
_REASON_BYTES = 1000
# The reason that other ranks get if a rank has called restart() before them.
RESTARTING = "it is forming a new job"


def init(
    comm: Any = None, process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None
) -> None:
    """Start the engine; harmless when it runs already.

    Args:
        comm: which ranks form the job: an mpi4py communicator; a list of ranks of those that the
            launcher started; or a list of communicators, the first for the job and the others as
            process sets. Default is all ranks that the launcher started.
        process_sets: sets to register, the same on every rank; or "dynamic", which allows sets to
            be added and removed later.

    Raises:
        UsageError: no usable MPI, a QSGD_* variable that is wrong or differs between ranks, or a
            communicator or process set that cannot be.
    """
    global _context, _at_exit, _owner_pid, _arguments
    with _lock:
        if _context is not None:
            return
        if _wrecks:
            raise RankFailedError(
                "a rank of this job has died, so its MPI cannot be used again; end this process "
                "and start the job from its last checkpoint"
            )
        settings = job_settings.read()
        if process_sets == "dynamic":
            settings["QSGD_DYNAMIC_PROCESS_SETS"] = True
        with roll_call.waiting(settings, every_rank=comm is None):
            mpi = mpi_binding.start_mpi()
            own, split = job.communicators(mpi, comm)
            try:
                job_settings.require_equal(own, settings)
            except UsageError:
                own.Free()
                raise
        _context = _build(mpi, own, settings)
        _owner_pid, _arguments = os.getpid(), (comm, process_sets)
        if not _at_exit:
            atexit.register(_leave)
            _at_exit = True
    _set_up(split, process_sets)


def _set_up(split: list[Any], process_sets: Any) -> None:
    """Start what the settings ask for and register the given process sets, or undo it all."""
    from qsgd_hpc.runtime.process_sets import ProcessSet, register

    try:
        writing.start_as_set(context())
        autotune.start_as_set(context())
        given = [] if process_sets in (None, "dynamic") else list(process_sets)
        given = [s if isinstance(s, ProcessSet) else ProcessSet(s) for s in (*split, *given)]
        register(given)
    except BaseException:
        shutdown()
        raise


def _build(mpi: mpi_binding.Mpi, comm: Any, settings: job_settings.Settings) -> Context:
    import qsgd_hpc._core as _core

    rank, size = comm.Get_rank(), comm.Get_size()
    layout = mpi_binding.find_layout(mpi, comm, settings["QSGD_RANKS_PER_NODE"])
    shared, window = mpi_binding.share_node(mpi, comm, layout) if size > 1 else (None, None)
    tree = _core.Tree(rank, size, layout.nodes, settings["QSGD_FAN_OUT"])
    peers = lifeline.connect(comm, tree) if settings["QSGD_LIFELINE"] else []
    key = planning.key_of(
        mpi.module, None if shared is None else shared.nodes, size, env.get("QSGD_THREADS")
    )
    config = job_settings.engine_config(
        settings,
        planning.recall(comm, key) if size > 1 else None,
        lambda measured: planning.keep(key, measured),
        shares_memory=shared is not None,
    )
    engine = _core.Engine.over_mpi(mpi_binding.core_facts(mpi, comm), config, shared)
    engine.machine()  # measured before the script continues and uses the cores
    if peers:
        engine.watch(peers, GRACE_S)
    _core.set_current_engine(engine)
    dynamic = settings["QSGD_DYNAMIC_PROCESS_SETS"]
    return Context(
        engine=engine,
        comm=comm,
        window=window,
        mpi=mpi,
        rank=rank,
        size=size,
        local_rank=layout.local_rank,
        local_size=len(layout.node),
        cross_rank=layout.across.index(rank),
        cross_size=len(layout.across),
        homogeneous=layout.homogeneous,
        dynamic_process_sets=dynamic,
    )


def shutdown() -> None:
    """Leave the job; returns when every rank has left. Harmless when not initialised."""
    _shut_down("it called shutdown()", patience_s=1e9, record=True)


def restart() -> None:
    """Form the job again with the same ranks; collective. Pending operations are dropped.

    Process sets that were given to ``init`` are registered again; others are not.

    Raises:
        RankFailedError: a rank has died.
    """
    _shut_down(RESTARTING, patience_s=1e9, record=False)  # the job continues
    init(*_arguments)


def _shut_down(reason: str, patience_s: float, *, record: bool) -> None:
    global _context
    with _lock:
        if _context is None:
            return
        ended, _context = _context, None
    import qsgd_hpc._core as _core

    for process_set in ended.process_sets.values():
        process_set.process_set_id = None
    autotune.stop()
    _core.set_current_engine(None)
    ended.engine.shutdown(reason, patience_s)
    lifeline.forget()
    writing.stop(ended, together=not ended.engine.aborted())
    if ended.engine.aborted():
        _wrecks.append(ended)
        mpi_binding.give_up()
        return
    if record and env.get("QSGD_RECORDS"):
        from qsgd_hpc.recording import engine_record

        engine_record.leave(ended.engine, rank=ended.rank, ranks=ended.size)
    if ended.window is not None:
        ended.window.Free()
    ended.comm.Free()


def _leave() -> None:
    """At exit: leave the job and finalise MPI, or skip MPI when another rank is dead."""
    failure = getattr(sys, "last_value", None)
    if os.getpid() != _owner_pid:
        return
    reason = f"it ended with {type(failure).__name__}: {failure}" if failure else "its script ended"
    # An error may quote a file name that is not UTF-8, or a whole file.
    reason = reason.encode("utf-8", "replace")[:_REASON_BYTES].decode("utf-8", "ignore")
    _shut_down(reason, _PATIENCE_S if failure else 1e9, record=failure is None)
    mpi_binding.finalise()


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


def is_homogeneous() -> bool:
    """Tell whether every node has equally many processes of the job."""
    return context().homogeneous


def mpi_library_version() -> str:
    """Return the name and version of the MPI in use."""
    return context().mpi.library


def communication_stats() -> dict[str, float]:
    """Return what this rank has communicated since ``init``.

    Returns:
        A dictionary with

        - ``wire_bytes``: bytes this rank handed to other ranks, control messages included;
        - ``shared_memory_bytes``: those of them that went through memory which the ranks of its
          node share; the rest went in messages;
        - ``gradient_bytes``: bytes of the tensors it had reduced, before compression;
        - ``allreduces``: number of those tensors; ``fused_reductions``: reductions that carried
          them;
        - ``comm_time_s``: seconds its engine spent in collectives (it may overlap with computing);
        - ``coding_time_s``: those of them that it spent coding, adding and decoding messages of
          compressed reductions, by the clock of the engine's thread; 0 without compression, where
          adding is a part of the exchange. Measured by segment, while others may travel;
        - ``wait_time_s``: seconds in which at least one thread of the program was blocked in a
          handle's ``wait``: communication that no computing hid. Frameworks that wait by themselves
          (TensorFlow, and JAX where it compiles) block in no handle, so this leaves them out;
        - ``steps``: training steps begun; see :func:`step_profile`.
    """
    stats: dict[str, float] = context().engine.stats()
    return stats


def step_profile() -> dict[str, Any]:
    """Return when this rank's training steps began, and what of its communication fell into each.

    The engine detects steps without being told of them: one begins when some named tensor is
    reduced more often than any has been so far, at that submission, and lasts until the next
    begins. So a metric that is reduced once per epoch begins no step, and one that is reduced twice
    per step would begin two; an evaluation between two steps is part of the earlier one.

    Returns:
        A dictionary with

        - ``steps``: number of steps begun since ``init``;
        - ``step_s``, ``wait_s``, ``comm_s``, ``coding_s``, ``wire_bytes``: arrays of one length
          with a value per step that is over, the last of them last, and the last 65,536 at most:
          seconds that it took, and by how much ``wait_time_s``, ``comm_time_s``,
          ``coding_time_s`` and ``wire_bytes`` of :func:`communication_stats` grew in it;
        - ``layers``: ``[(name, elements, ready_s), ...]`` of the last step that is over: the
          tensors that come in every step, in the order in which they were submitted, ``ready_s``
          seconds after the first; ``backward_s``: when the last of them was;
        - ``waits_seen``: False if the framework waits for some of them itself, so that
          ``wait_s`` and ``wait_time_s`` leave that out.
    """
    profile: dict[str, Any] = context().engine.step_profile()
    layers = [(n.removeprefix("allreduce."), count, s) for n, count, s in profile["layers"]]
    return {**profile, "layers": layers, "backward_s": layers[-1][2] if layers else 0.0}


def compression_stats() -> dict[str, dict[str, Any]]:
    """Return how each tensor travels for which compression was asked, by name.

    Returns:
        for each name: coding, as text, and bits per element, both as they now are; nmse: squared
        error of this rank's codes over the squared magnitude of what they code, in a sample of
        the last reduction, and mean_nmse over all ``reductions``; wire_bytes of one coded copy;
        elements.
    """
    stats = context().engine.quality()
    return {name.removeprefix("allreduce."): quality for name, quality in stats.items()}


def start_timeline(path: str, mark_cycles: bool = False) -> None:
    """Write what happens to every tensor from now on, until ``stop_timeline`` or ``shutdown``.

    Rank 0 writes; calls on other ranks do nothing. With ``{rank}`` in the path, or with
    QSGD_TIMELINE_ALL_RANKS=1, every rank writes a file of its own and all ranks must call.

    Args:
        path: the file, which is replaced. Its folder must exist.
        mark_cycles: mark where the ranks have agreed on what to do next.
    Raises:
        UsageError: a timeline is being written already, or the file cannot be.
    """
    writing.start(context(), path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Finish the file; harmless when there is none.

    Where every rank writes, all must call, and rank 0 merges the files that it can see.
    """
    writing.stop(context())
