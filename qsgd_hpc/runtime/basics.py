"""init, shutdown, and the ranks and sizes of the job, for all framework modules.

There is one context per process. ``init`` and ``shutdown`` can be called repeatedly, in turn.
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
from qsgd_hpc.runtime import autotune, job_settings, lifeline, mpi_binding, planning, roll_call
from qsgd_hpc.timeline import writing

if TYPE_CHECKING:
    from qsgd_hpc.runtime.process_sets import ProcessSet

# What every framework module takes by `from ... import *`.
__all__ = [
    "communication_stats", "compression_stats", "cross_rank", "cross_size", "init",
    "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_library_version", "rank",
    "shutdown", "size", "start_timeline", "step_profile", "stop_timeline",
]  # fmt: skip

# How long this process may run after another rank's death without noticing it; the job must end
# within 30 s.
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
    """Registered sets by number, except set 0, which contains all ranks."""
    counters: Counter[str] = field(default_factory=Counter)
    """Number of unnamed operations of each kind; equal on ranks that make equal calls."""


_context: Context | None = None
_lock = threading.Lock()
_at_exit = False
_arguments: tuple[Any, Any] = (None, None)  # of the last init
_owner_pid = 0  # the process that called init; a forked child has the context, but not its threads
# Kinds of counters that number objects, which outlive a restart, not operations.
_OF_OBJECTS = ("optimizer.", "SyncBatchNorm", "adasum")
# Contexts of jobs that lost a rank. They are never freed: MPI may still write to their memory, and
# it cannot be finalised.
_failed: list[Context] = []
# After an error, a rank waits this long for the others to notice it before it ends the job.
_PATIENCE_S = 5.0
_REASON_BYTES = 1000
# The reason that other ranks get if a rank has called restart() before them.
RESTARTING = "it is forming a new job"


def init(
    comm: Any = None, process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None
) -> None:
    """Start the engine. Does nothing if it is already running.

    Args:
        comm: the ranks of the job: an mpi4py communicator; a list of the launched ranks; or a list
            of communicators, the first for the job and the others as process sets. Default: all
            launched ranks.
        process_sets: sets to register, the same on every rank; or "dynamic", which allows sets to
            be added and removed later.

    Raises:
        UsageError: no usable MPI, a QSGD_* variable that is invalid or differs between ranks, or
            an invalid communicator or process set.
    """
    global _context, _at_exit, _owner_pid, _arguments
    with _lock:
        if _context is not None:
            return
        if process_sets != "dynamic" and isinstance(process_sets, str):
            raise UsageError(f'process_sets={process_sets!r}: pass a list of sets, or "dynamic"')
        if _failed:
            raise RankFailedError(
                "a rank of this job has died, so its MPI cannot be used again; end this process "
                "and start the job from its last checkpoint"
            )
        settings = job_settings.read()
        if process_sets == "dynamic":
            settings["QSGD_DYNAMIC_PROCESS_SETS"] = True
        with roll_call.waiting(settings, every_rank=comm is None):
            mpi = mpi_binding.start_mpi()
            own, split = mpi_binding.communicators(mpi, comm)
            try:
                job_settings.require_equal(own, settings)
            except UsageError:
                own.Free()
                raise
            if own.rank == 0:
                job_settings.warn_of_misspelt()
        _context = _build(mpi, own, settings)
        _owner_pid, _arguments = os.getpid(), (comm, process_sets)
        if not _at_exit:
            atexit.register(_leave)
            _at_exit = True
    _set_up(split, process_sets)


def _set_up(split: list[Any], process_sets: Any) -> None:
    """Start the requested components and register the given process sets, or undo all of it."""
    from qsgd_hpc.runtime.process_sets import ProcessSet, register

    try:
        writing.start_from_environment(context())
        autotune.start_from_environment(context())
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
        dynamic_process_sets=settings["QSGD_DYNAMIC_PROCESS_SETS"],
    )


def shutdown() -> None:
    """Leave the job; return when every rank has left. Does nothing if not initialised."""
    _shut_down("it called shutdown()", patience_s=1e9, record=True)


def restart() -> None:
    """Form the job again with the same ranks; collective. Pending operations are dropped.

    Process sets that were passed to ``init`` are registered again; others are not.

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
        _failed.append(ended)
        mpi_binding.give_up()
        return
    if record and env.get("QSGD_RECORDS"):
        from qsgd_hpc.recording import engine_record

        engine_record.write_record(ended.engine, rank=ended.rank, ranks=ended.size)
    if ended.window is not None:
        ended.window.Free()
    ended.comm.Free()


def _leave() -> None:
    """At exit: leave the job and finalise MPI, or skip MPI if another rank has died."""
    failure = getattr(sys, "last_value", None)
    if os.getpid() != _owner_pid:
        return
    reason = f"it ended with {type(failure).__name__}: {failure}" if failure else "its script ended"
    # An error may quote a file name that is not UTF-8, or a complete file.
    reason = reason.encode("utf-8", "replace")[:_REASON_BYTES].decode("utf-8", "ignore")
    _shut_down(reason, _PATIENCE_S if failure else 1e9, record=failure is None)
    mpi_binding.finalise()


def is_initialized() -> bool:
    """Return whether ``init`` has been called and ``shutdown`` has not."""
    return _context is not None


def context() -> Context:
    """Return the running context.

    Raises:
        UsageError: ``init`` has not been called, or this process was forked from a rank.
    """
    running = _layout()
    if os.getpid() != _owner_pid:
        raise UsageError(
            f"process {os.getpid()} was forked from rank {running.rank} after hvd.init() and "
            "cannot communicate; call hvd in the rank itself, not in a data loader's worker"
        )
    return running


def _layout() -> Context:
    """Return the context, also in a process forked from the rank, such as a data loader's."""
    if _context is None:
        raise UsageError("qsgd_hpc is not initialised on this rank; call hvd.init() first")
    return _context


def object_numbers() -> dict[str, int]:
    """Return how many optimizers and layers have been numbered since ``init``, by kind."""
    counters = context().counters
    return {kind: n for kind, n in counters.items() if kind.startswith(_OF_OBJECTS)}


def next_number(kind: str) -> int:
    """Return 0, 1, 2, ... for each kind of unnamed operation, from 0 again after ``init``."""
    counters = context().counters
    counters[kind] += 1
    return counters[kind] - 1


def joins() -> int:
    """Return how often this rank has joined since ``init``; equal on all ranks after a join.

    State that ranks derive from earlier calls may differ after that: a joined rank made fewer.
    """
    count: int = context().engine.joins()
    return count


def rank() -> int:
    """Return the rank of this process in the job, from 0."""
    return _layout().rank


def size() -> int:
    """Return the number of processes of the job."""
    return _layout().size


def local_rank() -> int:
    """Return the rank of this process on its node, from 0: the index of its GPU."""
    return _layout().local_rank


def local_size() -> int:
    """Return the number of processes on this node."""
    return _layout().local_size


def cross_rank() -> int:
    """Return the index of this node among the nodes with a process of this local rank."""
    return _layout().cross_rank


def cross_size() -> int:
    """Return the number of nodes with a process of this local rank."""
    return _layout().cross_size


def is_homogeneous() -> bool:
    """Return whether every node has the same number of processes of the job."""
    return _layout().homogeneous


def mpi_library_version() -> str:
    """Return the name and version of the MPI in use."""
    return context().mpi.library


def communication_stats() -> dict[str, float]:
    """Return counters of this rank's communication since ``init``.

    Returns:
        A dictionary with

        - ``wire_bytes``: bytes that this rank sent to other ranks, including control messages;
        - ``shared_memory_bytes``: the part of ``wire_bytes`` that was sent through shared memory
          of the node; the rest was sent in messages;
        - ``gradient_bytes``: bytes of the reduced tensors, before compression;
        - ``allreduces``: number of these tensors; ``fused_reductions``: number of reductions that
          contained them;
        - ``comm_time_s``: seconds that the engine spent in collectives; may overlap with computing;
        - ``coding_time_s``: the part of ``comm_time_s`` spent coding, adding and decoding messages
          of compressed reductions, by the clock of the engine's thread; 0 without compression,
          where adding is part of the exchange. Other segments may be sent during that time;
        - ``wait_time_s``: seconds in which at least one thread of the program was blocked in a
          handle's ``wait``: exposed communication. Frameworks that wait themselves (TensorFlow, and
          compiled JAX) do not block in a handle and are not included;
        - ``steps``: number of training steps that have begun; see :func:`step_profile`.
    """
    stats: dict[str, float] = context().engine.stats()
    return stats


def step_profile() -> dict[str, Any]:
    """Return the durations of this rank's training steps and the communication in each.

    The engine detects steps: a step begins when a named tensor is submitted more often than any
    tensor so far, and lasts until the next step begins. A metric that is reduced once per epoch
    therefore does not begin a step, but one that is reduced twice per step begins two. An
    evaluation between two steps is part of the first.

    Returns:
        A dictionary with

        - ``steps``: number of steps begun since ``init``;
        - ``step_s``, ``wait_s``, ``comm_s``, ``coding_s``, ``wire_bytes``: arrays of equal length
          with a value per finished step, oldest first, for at most the last 65,536 steps: its
          duration in seconds, and the increase of ``wait_time_s``, ``comm_time_s``,
          ``coding_time_s`` and ``wire_bytes`` of :func:`communication_stats` in it;
        - ``layers``: ``[(name, elements, ready_s), ...]`` of the last finished step: the tensors
          of every step, in the order of submission, ``ready_s`` seconds after the first;
          ``backward_s``: the time of the last;
        - ``waits_seen``: False if the framework waits for some of them itself, so that
          ``wait_s`` and ``wait_time_s`` do not include that time.
    """
    profile: dict[str, Any] = context().engine.step_profile()
    layers = [(n.removeprefix("allreduce."), count, s) for n, count, s in profile["layers"]]
    return {**profile, "layers": layers, "backward_s": layers[-1][2] if layers else 0.0}


def compression_stats() -> dict[str, dict[str, Any]]:
    """Return the compression of each tensor for which it was requested, by name.

    Returns:
        for each name: coding (as text) and bits per element, both current; nmse: squared error of
        this rank's codes over the squared magnitude of their input, in a sample of the last
        reduction, and mean_nmse over all ``reductions``; wire_bytes of one coded copy; elements.
    """
    stats = context().engine.quality()
    return {name.removeprefix("allreduce."): quality for name, quality in stats.items()}


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to write a timeline of all tensors, until ``stop_timeline`` or ``shutdown``.

    Rank 0 writes; calls on other ranks do nothing. With ``{rank}`` in the path, or with
    QSGD_TIMELINE_ALL_RANKS=1, every rank writes its own file, and all ranks must call this.

    Args:
        file_path: the file, which is replaced. Its folder must exist.
        mark_cycles: mark the times at which the ranks have agreed on the next operations.
    Raises:
        UsageError: a timeline is already being written, or the file cannot be written.
    """
    writing.start(context(), file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Finish the timeline. Does nothing if there is none.

    If every rank writes a file, all ranks must call this, and rank 0 merges the files that it can
    read.
    """
    writing.stop(context())
