"""Collectives over JAX arrays: on concrete ones, blocking and asynchronous, and inside ``jit``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qsgd_hpc.compression import Lossy
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.compressors import NoneCompressor
from qsgd_hpc.frameworks.eager import as_rows
from qsgd_hpc.frameworks.reduction import (
    CURVED,
    Reduction,
    coding_for,
    op_for,
    reduction_of,
    require_values,
)
from qsgd_hpc.jax.compression import compressed
from qsgd_hpc.jax.ops._collective import (
    Arrays,
    Collective,
    first,
    is_traced,
    named,
    refuse_traced,
    run,
)
from qsgd_hpc.jax.ops._differentiable import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Reducescatter,
)
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Handle, Op, barrier, checked_splits, poll, synchronize
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_async", "alltoall", "alltoall_async",
    "barrier", "broadcast", "broadcast_async", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_async", "grouped_reducescatter",
    "grouped_reducescatter_async", "join", "poll", "reducescatter", "reducescatter_async",
    "synchronize",
]  # fmt: skip

Make = Callable[..., Collective]


def _fields(
    kind: str, reduction: Reduction, arrays: Arrays, name: str | None, grouped: bool
) -> dict[str, Any]:
    return {
        **named(kind, name, reduction.process_set, arrays, grouped=grouped),
        "op": reduction.op,
        "prescale": reduction.prescale,
        "postscale": reduction.postscale,
    }


def _allreduce(
    reduction: Reduction, arrays: Arrays, name: str | None, *, grouped: bool
) -> Allreduce:
    coding_for(reduction)  # raises if it cannot be coded
    compression = reduction.compression
    return Allreduce(
        **_fields("allreduce", reduction, arrays, name, grouped),
        compression=compression if isinstance(compression, Lossy) else None,
        lasting=reduction.lasting or is_traced(arrays),
    )


def _reducescatter(
    reduction: Reduction, arrays: Arrays, name: str | None, *, grouped: bool
) -> Reducescatter:
    require_values(reduction)
    rows = tuple(as_rows(array, "reducescatter", "arrays").shape[0] for array in arrays)
    fields = _fields("reducescatter", reduction, arrays, name, grouped)
    return Reducescatter(**fields, total_rows=rows)


def _compressed(
    reduction: Reduction, tensors: Arrays
) -> tuple[list[Any], Callable[[Arrays], list[Any]]]:
    """Return the arrays to send, and a function that converts the reduced ones."""
    arrays = [jnp.asarray(tensor) for tensor in tensors]
    for array in arrays:
        op_for(reduction.op, array.dtype.name, reduction.prescale, reduction.postscale)
    return compressed(arrays, reduction.compression)


def _times(arrays: Arrays, factor: float) -> list[Any]:
    return [(array * factor).astype(array.dtype) for array in arrays]


def _now(
    make: Make, reduction: Reduction, name: str | None, tensors: Arrays, *, grouped: bool = False
) -> list[Any]:
    """Execute a reduction.

    If the derivative depends on the values, JAX multiplies by the factors, so that it
    differentiates them, too; otherwise the core does.
    """
    to_send, restored = _compressed(reduction, tensors)
    factors = reduction.prescale, reduction.postscale
    if factors == (1.0, 1.0) or reduction.op not in CURVED or not is_traced(to_send):
        return restored(run(make(reduction, to_send, name, grouped=grouped), to_send))
    plain = replace(reduction, prescale=1.0, postscale=1.0)
    scaled = _times(to_send, reduction.prescale)
    made = restored(run(make(plain, scaled, name, grouped=grouped), scaled))
    return made if reduction.postscale == 1 else _times(made, reduction.postscale)


def _later(
    make: Make, reduction: Reduction, name: str | None, tensors: Arrays, function: str
) -> Handle:
    refuse_traced(tensors, function)
    to_send, restored = _compressed(reduction, tensors)
    call = make(reduction, to_send, name, grouped=function.startswith("grouped"))
    return call.start(to_send).then(restored)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> jax.Array:
    """Return the average (or ``op``) of every rank's array; shapes must be equal.

    Works on concrete arrays and inside ``jit``, ``grad``, ``vmap``, ``scan`` and ``cond``. Its
    gradient is the same reduction of the ranks' output gradients, for Average and Sum.

    Args:
        tensor: any numeric dtype.
        average: deprecated: ``op=hvd.Average`` (True) or ``op=hvd.Sum`` (False).
        name: pairs the calls of the ranks; default: by order, inside ``jit`` by the order of
            tracing.
        compression: one of ``hvd.Compression``.
        op: Average (default), Sum, Min, Max, Product or Adasum. Integers average towards zero.
        prescale_factor: multiplies every rank's array before the sum.
        postscale_factor: multiplies the result.
        process_set: the participating ranks; default: all.
    Raises:
        HorovodInternalError: the ranks' arrays do not match, or a rank died. From
            compiled programs, JAX raises its own error with that text; see
            ``hvd.translated_errors``.
    """
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return first(_now(_allreduce, reduction, name, [tensor]))


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an allreduce of a concrete array; ``synchronize`` returns its result."""
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return _later(_allreduce, reduction, name, [tensor], "allreduce").then(first)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[jax.Array]:
    """Reduce several arrays, which complete or fail together; see :func:`allreduce`."""
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return _now(_allreduce, reduction, name, tensors, grouped=True)


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a ``grouped_allreduce`` of concrete arrays; ``synchronize`` returns its results."""
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return _later(_allreduce, reduction, name, tensors, "grouped_allreduce")


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    average: bool | None = None,
) -> jax.Array:
    """Return this rank's rows of the average (or ``op``) of all ranks' arrays.

    Its gradient is the ranks' output gradients, gathered, times the factors; for Sum also times
    the number of ranks.

    Args:
        tensor: at least one dimension; shapes must be equal. The rows are split as evenly as
            possible; the first ranks get one more.
        name: pairs the calls of the ranks; default: by order.
        compression: ``hvd.Compression.none``, ``fp16`` or ``bf16``, or a custom class.
        op: Average (default), Sum, Min, Max or Product.
        process_set: the participating ranks; default: all.
        prescale_factor: multiplies every rank's array before the sum.
        postscale_factor: multiplies the result.
        average: deprecated: ``op=hvd.Average`` (True) or ``op=hvd.Sum`` (False).
    Raises:
        HorovodInternalError: the ranks' arrays do not match, or a rank died.
    """
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return first(_now(_reducescatter, reduction, name, [tensor]))


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    average: bool | None = None,
) -> Handle:
    """Start a ``reducescatter`` of a concrete array; ``synchronize`` returns its result."""
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return _later(_reducescatter, reduction, name, [tensor], "reducescatter").then(first)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    average: bool | None = None,
) -> list[jax.Array]:
    """Reduce and scatter several arrays, which complete or fail together."""
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return _now(_reducescatter, reduction, name, tensors, grouped=True)


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    average: bool | None = None,
) -> Handle:
    """Start a ``grouped_reducescatter`` of concrete arrays; ``synchronize`` returns its results."""
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return _later(_reducescatter, reduction, name, tensors, "grouped_reducescatter")


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


def join() -> int:
    """Announce that this rank has no more batches; return the last rank when all have joined.

    Until then it contributes zeros to the others' allreduces, which count in averages.
    Other collectives raise on the ranks that have not joined.
    """
    return ops.join()
