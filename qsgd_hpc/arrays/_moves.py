"""``allgather``, ``broadcast`` and ``alltoall`` of arrays, blocking and asynchronous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsgd_hpc.arrays._memory import adapter_of, view_of, writable_view_of
from qsgd_hpc.frameworks.eager import start_allgathers, start_alltoall, start_broadcast
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Handle
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather", "allgather_async", "alltoall", "alltoall_async", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "grouped_allgather", "grouped_allgather_async",
]  # fmt: skip

Array = NDArray[Any]


def _only(made: list[tuple[Array, list[int]]]) -> Array:
    return made[0][0]


def allgather_async(
    array: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an ``allgather``; ``synchronize`` returns its result."""
    text = ops.label("allgather", name, process_set)
    views = [view_of(array)]
    handle = start_allgathers(adapter_of(views), views, text, process_set)
    return handle.then(_only)


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
