"""The ranks of the job: validates the ``comm`` of ``init``."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import mpi_binding

__all__ = ["communicators"]

_EXPECTED = (
    "pass an mpi4py communicator such as MPI.COMM_WORLD.Split(color, key), a list of ranks, or a "
    "list of communicators"
)


def communicators(mpi: mpi_binding.Mpi, comm: Any) -> tuple[Any, list[Any]]:
    """Return this package's own communicator of the job, and those that become process sets.

    Args:
        mpi: the MPI of this process.
        comm: None or an empty list for all ranks that the launcher started; an mpi4py communicator;
            a list of ranks of MPI.COMM_WORLD, passed by those ranks alone; or a list of
            communicators, of which the first is the job.

    Raises:
        UsageError: it is none of these, or this rank is not in it.
    """
    listed = list(comm) if isinstance(comm, Sequence) else None
    sets: list[Any] = []
    if comm is None or listed == []:
        own = mpi.module.COMM_WORLD.Dup()
    elif listed is None:
        own = _duplicate(mpi, comm)
    elif all(hasattr(each, "Dup") for each in listed):
        first, *sets = listed
        own = _duplicate(mpi, first)
    else:
        own = _of_ranks(mpi, listed)
    own.Set_errhandler(mpi.module.ERRORS_RETURN)
    return own, sets


def _duplicate(mpi: mpi_binding.Mpi, comm: Any) -> Any:
    if not hasattr(comm, "Dup"):
        raise UsageError(f"init(comm={comm!r}): {_EXPECTED}")
    if comm == mpi.module.COMM_NULL:
        raise UsageError(
            f"rank {mpi.module.COMM_WORLD.Get_rank()} of the launched ranks passed "
            "MPI.COMM_NULL to init: it belongs to no job and must not call init"
        )
    return comm.Dup()


def _of_ranks(mpi: mpi_binding.Mpi, ranks: list[Any]) -> Any:
    world = mpi.module.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    wrong = [r for r in ranks if not isinstance(r, Integral) or isinstance(r, bool)]
    if wrong or len(set(ranks)) < len(ranks) or not all(0 <= r < size for r in ranks):
        raise UsageError(
            f"init(comm={ranks!r}): {_EXPECTED}; ranks are 0 to {size - 1}, each named once"
        )
    if rank not in ranks:
        raise UsageError(
            f"rank {rank} called init(comm={ranks!r}) but is not in that list: only the ranks "
            "in the list form the job; on other ranks, pass their list or do not call init"
        )
    group = world.Get_group().Incl([int(r) for r in ranks])
    own = world.Create_group(group)  # collective over the ranks in the group alone
    group.Free()
    return own
