"""Process sets: collectives over some of the job's ranks.

Each set has a number, equal on every rank; set 0 contains all ranks. Sets are passed to ``init``,
or added later by all ranks together after ``init(process_sets="dynamic")``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from qsgd_hpc._core import Operation
from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import basics

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "process_set_ids_and_ranks",
    "remove_process_set",
    "require_member",
]


class ProcessSet:
    """A subset of the job's ranks that communicate with each other.

    Args:
        ranks: ranks of the job, in any order; or an mpi4py communicator of them, such as the
            result of ``Split`` (each rank passes its own).

    Raises:
        UsageError: the ranks are empty, negative, duplicated or not integers.
    """

    process_set_id: int | None = None
    """The number that identifies this set in collectives; None while it is not registered."""

    def __init__(self, ranks: Iterable[int] | Any) -> None:
        self.mpi_comm: Any = ranks if hasattr(ranks, "Get_group") else None
        self._ranks = None if self.mpi_comm is not None else _checked(ranks)

    @property
    def ranks(self) -> list[int] | None:
        """Ranks of the job, ascending; None for a communicator that is not registered."""
        return None if self._ranks is None else list(self._ranks)

    def size(self) -> int | None:
        """Return the number of ranks in the set; None while it is not registered."""
        return None if self.process_set_id is None else len(self._members())

    def rank(self) -> int | None:
        """Return this rank's position in the set; None if it is not in it, or not registered."""
        if not self.included():
            return None
        return self._members().index(basics.rank())

    def included(self) -> bool | None:
        """Return whether this rank is in the set; None while it is not registered."""
        return None if self.process_set_id is None else basics.rank() in self._members()

    def _members(self) -> Sequence[int]:
        assert self._ranks is not None
        return self._ranks

    def __repr__(self) -> str:
        return f"ProcessSet(ranks={self.ranks}, process_set_id={self.process_set_id})"


def _checked(ranks: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(ranks, Iterable):
        raise UsageError(f"ProcessSet({ranks!r}): pass a list of ranks")
    given = list(ranks)
    wrong = [r for r in given if not isinstance(r, Integral) or isinstance(r, bool) or r < 0]
    if not given or wrong or len(set(given)) < len(given):
        raise UsageError(f"ProcessSet({given!r}): pass one or more ranks from 0, each once")
    return tuple(sorted(int(r) for r in given))


class _GlobalProcessSet(ProcessSet):
    """All ranks of the running job."""

    def __init__(self) -> None:
        super().__init__([0])

    @property
    def ranks(self) -> list[int] | None:
        return list(self._members()) if basics.is_initialized() else None

    def size(self) -> int | None:
        return basics.size() if basics.is_initialized() else None

    def included(self) -> bool | None:
        return True if basics.is_initialized() else None

    def _members(self) -> Sequence[int]:
        return range(basics.size())

    def __reduce__(self) -> str:
        # A copy would not change when the job's ranks change.
        return "global_process_set"


global_process_set = _GlobalProcessSet()
"""All ranks of the job; the default of every ``process_set=``."""
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set; every rank of the job must call this, including ranks outside the set.

    Returns:
        The registered set.
    Raises:
        UsageError: not allowed at ``init``, the set exists, or a rank is not in this job.
        HorovodInternalError: the ranks of the job passed different sets.
    """
    _require_dynamic("add")
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    register([new])
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set; every rank of the job must call this.

    Returns:
        Whether the set existed; the set of all ranks cannot be removed.
    Raises:
        UsageError: not allowed at ``init``.
    """
    _require_dynamic("remove")
    number = process_set.process_set_id
    if not number:
        return False
    context = basics.context()
    context.engine.start(Operation(kind="remove_process_set", ranks=[number])).wait()
    process_set.process_set_id = None
    context.process_sets.pop(number, None)
    return True


def _require_dynamic(verb: str) -> None:
    if not basics.context().dynamic_process_sets:
        raise UsageError(
            f"cannot {verb} a process set after init: call init(process_sets='dynamic'), or set "
            "HOROVOD_DYNAMIC_PROCESS_SETS=1 for all ranks"
        )


def process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return every registered set by its number, including the set of all ranks."""
    sets = basics.context().process_sets
    return {0: list(range(basics.size())), **{n: s.ranks or [] for n, s in sorted(sets.items())}}


def require_member(process_set: ProcessSet) -> int:
    """Return the number of a set to which this rank belongs.

    Raises:
        UsageError: it is no set, or not registered, or this rank is not in it.
    """
    if not isinstance(process_set, ProcessSet):
        raise UsageError(
            f"process_set={process_set!r}: pass a hvd.ProcessSet, such as the result of "
            "hvd.add_process_set([0, 1]) on every rank"
        )
    number, rank = process_set.process_set_id, basics.rank()
    if number is None:
        raise UsageError(
            f"rank {rank}: {process_set} is not registered; pass it to init(process_sets=[...]), "
            "or to add_process_set on every rank"
        )
    if not process_set.included():
        raise UsageError(
            f"rank {rank} is not in {process_set}; call this where process_set.included()"
        )
    return number


def register(sets: Sequence[ProcessSet]) -> None:
    """Number the sets in order; collective over the job."""
    for each in sets:
        if each.mpi_comm is None:
            _add(each)
        else:
            _add_split(each)


def _add(new: ProcessSet) -> None:
    context, ranks = basics.context(), list(new._members())
    if ranks[-1] >= context.size:
        raise UsageError(
            f"rank {context.rank}: ProcessSet({ranks}) names rank {ranks[-1]}, but the job has "
            f"{context.size} ranks, from 0"
        )
    for number, known in process_set_ids_and_ranks().items():
        if known == ranks:
            raise UsageError(
                f"a process set with the ranks {ranks} already exists: number {number}"
            )
    handle = context.engine.start(Operation(kind="add_process_set", ranks=ranks))
    handle.wait()
    new.process_set_id = handle.result()
    context.process_sets[new.process_set_id] = new


def _add_split(new: ProcessSet) -> None:
    """Register the sets of all ranks, which differ after ``Split``: each set once, in order."""
    context = basics.context()
    assert new.mpi_comm is not None
    own, job = new.mpi_comm.Get_group(), context.comm.Get_group()
    ranks = type(own).Translate_ranks(own, None, job)
    missing = [at for at, rank in enumerate(ranks) if not 0 <= rank < context.size]
    members = tuple(sorted(ranks)) if not missing else ()
    everyone = context.comm.allgather(members)
    if () in everyone:
        raise UsageError(
            f"rank {everyone.index(())}: the communicator of its ProcessSet has ranks outside "
            "this job; split the communicator that was passed to init"
        )
    new._ranks = members
    for each in sorted(set(everyone)):
        _add(new if each == members else ProcessSet(each))
