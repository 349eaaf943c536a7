"""``broadcast``, ``allgather`` and ``alltoall``: collectives that move arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.eager import as_rows
from qsgd_hpc.jax.ops._collective import Arrays, first, is_traced, named, refuse_traced, run
from qsgd_hpc.jax.ops._differentiable import Allgather, Alltoall, Broadcast
from qsgd_hpc.runtime.ops import Handle, checked_splits
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_async",
    "grouped_allgather",
    "grouped_allgather_async",
]


def _broadcast(arrays: Arrays, root_rank: int, name: str | None, sets: ProcessSet) -> Broadcast:
    return Broadcast(**named("broadcast", name, sets, arrays), root_rank=root_rank)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> jax.Array:
    """Return root_rank's array; shapes must be equal.

    Its gradient is the mean of the ranks' output gradients on the root, zeros on the others.

    Args:
        tensor: any dtype.
        root_rank: a rank of the job that is in the process set.
        name: pairs the calls of the ranks; default: by order.
        process_set: the participating ranks; default: all.
    Raises:
        UsageError: root_rank is not in the set.
        HorovodInternalError: the ranks' arrays do not match, or a rank died.
    """
    arrays = [jnp.asarray(tensor)]
    return first(run(_broadcast(arrays, root_rank, name, process_set), arrays))


def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a broadcast of a concrete array; ``synchronize`` returns root_rank's."""
    refuse_traced([tensor], "broadcast")
    arrays = [jnp.asarray(tensor)]
    return _broadcast(arrays, root_rank, name, process_set).start(arrays).then(first)


def _allgather(
    tensors: Sequence[Any],
    name: str | None,
    sets: ProcessSet,
    rows: Sequence[Sequence[int]] | None,
    *,
    grouped: bool,
) -> tuple[Allgather, list[Any]]:
    arrays = [jnp.asarray(tensor) for tensor in tensors]
    arrays = [array.reshape(1) if array.ndim == 0 else array for array in arrays]
    known = tuple(tuple(int(n) for n in each) for each in rows or ())
    fields = named("allgather", name, sets, arrays, grouped=grouped)
    return Allgather(**fields, known_rows=known), arrays


def allgather(
    tensor: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    rows: Sequence[int] | None = None,
) -> jax.Array:
    """Return every rank's array, concatenated in rank order.

    Its gradient is this rank's rows of the mean of the ranks' output gradients.

    Args:
        tensor: any dtype; ranks may differ in the first dimension only. Scalars count as
            one row each.
        name: pairs the calls of the ranks; default: by order.
        process_set: the participating ranks; default: all.
        rows: inside ``jit`` and ``grad``, where shapes must be known: the number of rows of every
            rank, if it differs between ranks.
    Raises:
        HorovodInternalError: the ranks' arrays do not match, or a rank died.
    """
    given = None if rows is None else [rows]
    call, arrays = _allgather([tensor], name, process_set, given, grouped=False)
    return first(run(call, arrays))


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an ``allgather`` of a concrete array; ``synchronize`` returns its result."""
    refuse_traced([tensor], "allgather")
    call, arrays = _allgather([tensor], name, process_set, None, grouped=False)
    return call.start(arrays).then(first)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    rows: Sequence[Sequence[int]] | None = None,
) -> list[jax.Array]:
    """Gather several arrays, which complete or fail together; see :func:`allgather`."""
    return run(*_allgather(tensors, name, process_set, rows, grouped=True))


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a ``grouped_allgather`` of concrete arrays; ``synchronize`` returns its results."""
    refuse_traced(tensors, "grouped_allgather")
    call, arrays = _allgather(tensors, name, process_set, None, grouped=True)
    return call.start(arrays)


def _alltoall(
    tensor: Any, splits: Any, received: Any, name: str | None, sets: ProcessSet
) -> tuple[Alltoall, list[Any]]:
    arrays = [as_rows(jnp.asarray(tensor), "alltoall", "arrays")]
    if is_traced([splits, received]):
        raise UsageError(
            "alltoall with traced splits=: shapes must be known inside jit; pass numbers"
        )
    fields = named("alltoall", name, sets, arrays)
    if splits is not None:
        given = np.asarray(splits).tolist()
        fields["sent"] = tuple(checked_splits(arrays[0].shape[0], given, sets))
    if received is not None:
        fields["received"] = tuple(int(n) for n in received)
    return Alltoall(**fields), arrays


def _with_rows(call: Alltoall, arrays: Arrays) -> Handle:
    return call.start_with_rows(*arrays).then(
        lambda made: (made[0], jnp.asarray(made[1], dtype=jnp.int32))
    )


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    received_splits: Sequence[int] | None = None,
) -> Any:
    """Send ``splits[i]`` rows to the i-th rank of the set; return the received rows in rank order.

    Its gradient is the output gradient, sent back to the ranks of the rows.

    Args:
        tensor: at least one dimension, any dtype; ranks may differ in the first only.
        splits: integers whose sum is the number of rows; default: equal numbers.
        name: pairs the calls of the ranks; default: by order.
        process_set: the participating ranks; default: all.
        received_splits: number of rows from each rank; needed with ``splits`` inside ``jit`` and
            ``grad``, where shapes must be known.
    Returns:
        The new array; with ``splits``, a pair of it and the number of rows from each rank (int32).
    Raises:
        UsageError: the sum of splits is not the number of rows.
        HorovodInternalError: the ranks' arrays do not match, or a rank died.
    """
    call, arrays = _alltoall(tensor, splits, received_splits, name, process_set)
    if splits is None:
        return first(run(call, arrays))
    if is_traced(arrays):
        made = first(run(call, arrays))
        return made, jnp.asarray(call.rows(0, arrays[0].shape), dtype=jnp.int32)
    return _with_rows(call, arrays).wait()


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an ``alltoall`` of a concrete array; ``synchronize`` returns its result."""
    refuse_traced([tensor], "alltoall")
    call, arrays = _alltoall(tensor, splits, None, name, process_set)
    return call.start(arrays).then(first) if splits is None else _with_rows(call, arrays)
