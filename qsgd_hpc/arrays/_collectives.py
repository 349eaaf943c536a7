"""The collectives of arrays, in place or not, blocking or not, in groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from qsgd_hpc.arrays._memory import adapter_of, view_of, writable_view_of
from qsgd_hpc.frameworks.eager import (
    start_allgathers,
    start_allreduces,
    start_alltoall,
    start_broadcast,
    start_reducescatters,
)
from qsgd_hpc.frameworks.reduction import reduction_of
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Handle, Op
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Options", "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
    "grouped_reducescatter", "grouped_reducescatter_async", "reducescatter", "reducescatter_async",
]  # fmt: skip

Array = NDArray[Any]

_STARTS: dict[str, Callable[..., Handle]] = {
    "allreduce": start_allreduces,
    "reducescatter": start_reducescatters,
}


class Options(TypedDict, total=False):
    """Arguments of every reducing call, other than its arrays and its name."""

    average: bool | None
    """Deprecated: ``op=hvd.Average`` (True) or ``op=hvd.Sum`` (False)."""
    op: Op | None
    """Average (default), Sum, Min, Max, Product or Adasum. Integers average towards zero."""
    prescale_factor: float
    """Multiplies every rank's array before the sum."""
    postscale_factor: float
    """Multiplies the result."""
    process_set: ProcessSet
    """The participating ranks; default: all."""
    compression: Any
    """One of ``hvd.Compression``, or a custom class with ``compress`` and ``decompress``."""


def _start(
    kind: str, arrays: Sequence[Array], name: str | None, options: Options, **how: bool
) -> Handle:
    """Start an allreduce, in place or into new arrays, or a reducescatter of arrays."""
    reduction = reduction_of(name, **options)
    text = ops.label(kind, name, reduction.process_set)
    return _STARTS[kind](adapter_of(arrays), arrays, reduction, text, **how)


def _only(made: list[Any]) -> Any:
    return made[0]


def allreduce_async(array: Any, name: str | None = None, **options: Unpack[Options]) -> Handle:
    """Start an ``allreduce``; ``synchronize`` returns its result as a new array."""
    return _start("allreduce", [view_of(array)], name, options).then(_only)


def allreduce_async_(array: Any, name: str | None = None, **options: Unpack[Options]) -> Handle:
    """Start an allreduce that replaces ``array``; do not access it before ``synchronize``."""
    view = writable_view_of(array, "allreduce_")
    return _start("allreduce", [view], name, options, in_place=True).then(lambda _: array)


def allreduce(array: Any, name: str | None = None, **options: Unpack[Options]) -> Array:
    """Return the average (or ``op``) of every rank's ``array``; shapes must be equal.

    Args:
        array: any numeric type; unchanged.
        name: pairs the calls of the ranks; default: by order.
        options: see :class:`Options`.
    Raises:
        HorovodInternalError: the ranks' arrays do not match, or a rank died.
    """
    reduced: Array = ops.run_now(allreduce_async, array, name, **options)
    return reduced


def allreduce_(array: Any, name: str | None = None, **options: Unpack[Options]) -> Any:
    """Replace ``array`` by the average (or ``op``) over the ranks; see :func:`allreduce`."""
    return ops.run_now(allreduce_async_, array, name, **options)


def grouped_allreduce_async(
    arrays: Sequence[Any], name: str | None = None, **options: Unpack[Options]
) -> Handle:
    """Start a ``grouped_allreduce``; ``synchronize`` returns its results as new arrays."""
    return _start("allreduce", [view_of(each) for each in arrays], name, options, grouped=True)


def grouped_allreduce_async_(
    arrays: Sequence[Any], name: str | None = None, **options: Unpack[Options]
) -> Handle:
    """Start a ``grouped_allreduce`` that replaces the arrays."""
    views = [writable_view_of(each, "grouped_allreduce_") for each in arrays]
    handle = _start("allreduce", views, name, options, in_place=True, grouped=True)
    return handle.then(lambda _: list(arrays))


def grouped_allreduce(
    arrays: Sequence[Any], name: str | None = None, **options: Unpack[Options]
) -> list[Array]:
    """Reduce several arrays, which complete or fail together; see :func:`allreduce`."""
    reduced: list[Array] = grouped_allreduce_async(arrays, name, **options).wait()
    return reduced


def grouped_allreduce_(
    arrays: Sequence[Any], name: str | None = None, **options: Unpack[Options]
) -> list[Any]:
    """Replace several arrays by their reductions; see :func:`grouped_allreduce`."""
    reduced: list[Any] = grouped_allreduce_async_(arrays, name, **options).wait()
    return reduced


def reducescatter_async(array: Any, name: str | None = None, **options: Unpack[Options]) -> Handle:
    """Start a ``reducescatter``; ``synchronize`` returns its result."""
    return _start("reducescatter", [view_of(array)], name, options).then(_only)


def reducescatter(array: Any, name: str | None = None, **options: Unpack[Options]) -> Array:
    """Return this rank's rows of the average (or ``op``) of all ranks' arrays.

    The rows are split as evenly as possible; the first ranks get one more. The arguments are those
    of :func:`allreduce`.
    """
    share: Array = ops.run_now(reducescatter_async, array, name, **options)
    return share


def grouped_reducescatter_async(
    arrays: Sequence[Any], name: str | None = None, **options: Unpack[Options]
) -> Handle:
    """Start a ``grouped_reducescatter``; ``synchronize`` returns its results."""
    return _start("reducescatter", [view_of(each) for each in arrays], name, options, grouped=True)


def grouped_reducescatter(
    arrays: Sequence[Any], name: str | None = None, **options: Unpack[Options]
) -> list[Array]:
    """Reduce and scatter several arrays, which complete or fail together."""
    shares: list[Array] = grouped_reducescatter_async(arrays, name, **options).wait()
    return shares


def allgather_async(
    array: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an ``allgather``; ``synchronize`` returns its result."""
    text = ops.label("allgather", name, process_set)
    views = [view_of(array)]
    handle = start_allgathers(adapter_of(views), views, text, process_set)
    return handle.then(lambda made: made[0][0])


def allgather(
    array: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Return every rank's ``array``, concatenated in rank order.

    Args:
        array: any type; ranks may differ in the first dimension only. Scalars count as one
            row each.
        name: pairs the calls of the ranks; default: by order.
        process_set: the participating ranks; default: all.
    """
    gathered: Array = ops.run_now(allgather_async, array, name, process_set)
    return gathered


def grouped_allgather_async(
    arrays: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a ``grouped_allgather``; ``synchronize`` returns its results."""
    text = ops.label("allgather", name, process_set)
    views = [view_of(array) for array in arrays]
    handle = start_allgathers(adapter_of(views), views, text, process_set, grouped=True)
    return handle.then(lambda made: [gathered for gathered, _ in made])


def grouped_allgather(
    arrays: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Gather several arrays, which complete or fail together; see :func:`allgather`."""
    gathered: list[Array] = grouped_allgather_async(arrays, name, process_set).wait()
    return gathered


def broadcast_async_(
    array: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start replacing ``array`` by root_rank's; do not access it before ``synchronize``."""
    view = writable_view_of(array, "broadcast_")
    text = ops.label("broadcast", name, process_set)
    handle = start_broadcast(adapter_of([view]), view, root_rank, text, process_set, in_place=True)
    return handle.then(lambda _: array)


def broadcast_async(
    array: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a ``broadcast``; ``synchronize`` returns its result."""
    text = ops.label("broadcast", name, process_set)
    view = view_of(array)
    return start_broadcast(adapter_of([view]), view, root_rank, text, process_set)


def broadcast_(
    array: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Replace ``array`` by root_rank's; shapes must be equal."""
    return ops.run_now(broadcast_async_, array, root_rank, name, process_set)


def broadcast(
    array: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Return root_rank's ``array``; shapes must be equal.

    Args:
        array: any type except objects; unchanged.
        root_rank: a rank of the job that is in the process set.
        name: pairs the calls of the ranks; default: by order.
        process_set: the participating ranks; default: all.
    Raises:
        UsageError: root_rank is not in the set.
        HorovodInternalError: the ranks' arrays do not match, or a rank died.
    """
    received: Array = ops.run_now(broadcast_async, array, root_rank, name, process_set)
    return received


def alltoall_async(
    array: Any,
    splits: Sequence[int] | Array | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an ``alltoall``; ``synchronize`` returns its result."""
    text = ops.label("alltoall", name, process_set)
    counts = None if splits is None else list(splits)

    def result(made: tuple[Array, list[int]]) -> Array | tuple[Array, Array]:
        rows, received = made
        return rows if splits is None else (rows, np.array(received, np.int32, like=rows))

    view = view_of(array)
    return start_alltoall(adapter_of([view]), view, counts, text, process_set).then(result)


def alltoall(
    array: Any,
    splits: Sequence[int] | Array | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array | tuple[Array, Array]:
    """Send some rows of ``array`` to each rank; return the received rows, in rank order.

    Args:
        array: at least one dimension; ranks may differ in the first one only.
        splits: number of rows for each rank of the process set; None sends the same number to each.
        name: pairs the calls of the ranks; default: by order.
        process_set: the participating ranks; default: all.
    Returns:
        The rows and, if ``splits`` were passed, the number of rows from each rank, as int32.
    Raises:
        UsageError: the sum of splits is not the number of rows (a ValueError, on this rank).
        HorovodInternalError: the ranks' arrays do not match, or a rank died.
    """
    made: Array | tuple[Array, Array]
    made = ops.run_now(alltoall_async, array, splits, name, process_set)
    return made
