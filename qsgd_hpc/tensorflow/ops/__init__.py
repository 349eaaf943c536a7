"""Collectives over TensorFlow's tensors, eagerly and in graphs, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from qsgd_hpc._core import Coding
from qsgd_hpc.errors import UnsupportedError, UsageError
from qsgd_hpc.frameworks.compressors import casting
from qsgd_hpc.frameworks.reduction import (
    CURVED,
    Reduction,
    coding_for,
    compressor_of,
    is_widened,
    op_for,
    reduction_of,
    require_values,
)
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.ops import Average, Op, Sum, barrier, ranks_of
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set, process_set_ids_and_ranks
from qsgd_hpc.tensorflow.compression import Compression
from qsgd_hpc.tensorflow.ops import _gradients as _gradients  # registers them
from qsgd_hpc.tensorflow.ops._names import full_name, names_and_group
from qsgd_hpc.tensorflow.ops._run import (
    as_rows,
    as_tensor,
    run,
    with_unknown_rows,
    without_autograph,
)

__all__ = [
    "allgather", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_", "grouped_allgather",
    "grouped_allreduce", "grouped_reducescatter", "join", "local_rank_op", "local_size_op",
    "process_set_included_op", "rank_op", "reducescatter", "size_op",
]  # fmt: skip

Slices = tf.IndexedSlices

# Sends integers as int64, whose sum does not wrap before the division.
(_Widened,) = casting(lambda _: True, tf.cast, Widened=tf.int64)


@dataclass(frozen=True)
class _Prepared:
    """One tensor in the form in which it is sent."""

    to_send: tf.Tensor
    compressor: Any
    context: Any
    op: Op
    prescale: float
    postscale: float
    factor: float
    """Factor by which TensorFlow multiplies the result."""
    coding: Coding | None

    def finish(self, reduced: tf.Tensor) -> tf.Tensor:
        back = self.compressor.decompress(reduced, self.context)
        return back if self.factor == 1 else back * tf.cast(self.factor, back.dtype)


def _prepare(tensor: tf.Tensor, reduction: Reduction, coding: Coding | None) -> _Prepared:
    op = op_for(reduction.op, tensor.dtype.name, reduction.prescale, reduction.postscale)
    widened = is_widened(tensor.dtype.name, op)
    compressor = _Widened if widened else compressor_of(reduction.compression)
    pre, post, factor = reduction.prescale, reduction.postscale, 1.0
    if op in CURVED and tensor.dtype.is_floating:
        # The derivative depends on the values, so TensorFlow scales them and differentiates that.
        tensor = tensor if pre == 1 else tensor * tf.cast(pre, tensor.dtype)
        pre, post, factor = 1.0, 1.0, post
    to_send, context = compressor.compress(tensor)
    coded = coding if tensor.dtype.is_floating else None
    return _Prepared(to_send, compressor, context, op, pre, post, factor, coded)


def reduce_all(
    kind: str,
    tensors: Sequence[tf.Tensor],
    reduction: Reduction,
    name: str | None,
    *,
    grouped: bool,
) -> list[tf.Tensor]:
    """Reduce tensors by an ``allreduce`` or a ``reducescatter``, in one operation."""
    names, group = names_and_group(kind, name, len(tensors), grouped=grouped)
    lasting = bool(names[0])
    coding = coding_for(replace(reduction, lasting=lasting))
    prepared = [_prepare(t, reduction, coding) for t in tensors]
    operations = [
        ops.operation(
            kind,
            text,
            reduction.process_set,
            op=p.op,
            prescale=p.prescale,
            postscale=p.postscale,
            coding=p.coding,
            lasting=lasting,
            check_finite=p.coding is not None,
            group=group,
        )
        for p, text in zip(prepared, names, strict=True)
    ]
    made = run(f"qsgd_{kind}", operations, tensors=[p.to_send for p in prepared])
    return [p.finish(reduced) for p, reduced in zip(prepared, made, strict=True)]


@without_autograph
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return the average (or ``op``) of every rank's ``tensor``; shapes must be equal.

    Its gradient is the same reduction of the ranks' output gradients, for Average and Sum.

    Args:
        tensor: any numeric dtype, or a value that converts to a tensor; or ``tf.IndexedSlices``,
            whose entries are gathered from all ranks and summed when they are used.
        average: deprecated: ``op=hvd.Average`` (True) or ``op=hvd.Sum`` (False).
        device_dense: accepted for compatibility, like ``device_sparse``; the engine needs neither.
        compression: one of ``hvd.Compression``.
        op: Average (default), Sum, Min, Max, Product or Adasum. Integers average towards zero.
        prescale_factor: multiplies every rank's tensor before the sum.
        postscale_factor: multiplies the result.
        name: pairs the calls of the ranks; default: by order, or in a graph by their position.
        process_set: the participating ranks; default: all.
        ignore_name_scope: accepted for compatibility; names have no scope here.
    Raises:
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
        UnsupportedError: sparse tensors with another op than Average or Sum.
    """
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    if isinstance(tensor, Slices):
        return _allreduce_sparse(tensor, reduction, name)
    dense = as_tensor(tensor)
    return reduce_all("allreduce", [dense], reduction, name, grouped=False)[0]


@without_autograph
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors, which complete or fail together; see :func:`allreduce`.

    ``tf.IndexedSlices`` among them are gathered separately.
    """
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    dense = [as_tensor(t) for t in tensors if not isinstance(t, Slices)]
    made = iter(reduce_all("allreduce", dense, reduction, name, grouped=True) if dense else [])
    results = []
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, Slices):
            text = name and f"{name}.{i}"
            results.append(_allreduce_sparse(tensor, reduction, text))
        else:
            results.append(next(made))
    return results


def _allreduce_sparse(tensor: Any, reduction: Reduction, name: str | None) -> Any:
    """Gather all ranks' entries; entries of one index count as their sum."""
    if reduction.op not in (Average, Sum):
        raise UnsupportedError(
            f"allreduce of tf.IndexedSlices with op={reduction.op!r}: choose hvd.Average or "
            "hvd.Sum, or pass tf.convert_to_tensor(tensor)"
        )
    text = name and f"sparse.{name}"
    sets = reduction.process_set
    parts = [tensor.values, tensor.indices]
    values, indices = gather_all(parts, text, sets, grouped=True, op=Sum)
    factor = reduction.prescale * reduction.postscale
    ranks = len(ranks_of(sets)) if reduction.op is Average else 1
    if values.dtype.is_floating or values.dtype.is_complex:
        if factor / ranks != 1:
            values = values * tf.cast(factor / ranks, values.dtype)
    elif factor != 1 or ranks != 1:
        values, indices = _divided(values, indices, factor, ranks)
    return Slices(values, indices, dense_shape=tensor.dense_shape)


def _divided(values: Any, indices: Any, factor: float, ranks: int) -> tuple[Any, Any]:
    """Sum the entries of each index, then divide towards zero, as the core does for tensors."""
    if values.dtype == tf.bool:
        raise UnsupportedError("bool tf.IndexedSlices have no average; choose integers")
    once, places = tf.unique(indices)
    sums = tf.math.unsorted_segment_sum(tf.cast(values, tf.int64), places, tf.size(once))
    means = tf.truncatediv(sums, ranks)
    if factor != 1:
        means = tf.cast(tf.cast(means, tf.float64) * factor, tf.int64)
    return tf.cast(means, values.dtype), once


@without_autograph
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Op | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    average: bool | None = None,
) -> tf.Tensor:
    """Return this rank's rows of the average (or ``op``) of all ranks' tensors.

    Its gradient is the ranks' output gradients, gathered, times the factors; for Sum also times
    the number of ranks.

    Args:
        tensor: at least one dimension, unchanged; shapes must be equal. The rows are split as
            evenly as possible; the first ranks get one more.
        device_dense: accepted for compatibility; the engine does not need it.
        compression: ``hvd.Compression.none``, ``fp16`` or ``bf16``, or a custom class.
        op: Average (default), Sum, Min, Max or Product.
        name: pairs the calls of the ranks; default: by order, or in a graph by their position.
        process_set: the participating ranks; default: all.
        ignore_name_scope: accepted for compatibility; names have no scope here.
        prescale_factor: multiplies every rank's tensor before the sum.
        postscale_factor: multiplies the result.
        average: deprecated: ``op=hvd.Average`` (True) or ``op=hvd.Sum`` (False).
    Raises:
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return _scatter([tensor], reduction, name, grouped=False)[0]


@without_autograph
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    average: bool | None = None,
) -> list[tf.Tensor]:
    """Reduce and scatter several tensors, which complete or fail together."""
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return _scatter(tensors, reduction, name, grouped=True) if tensors else []


def _scatter(
    tensors: Sequence[Any], reduction: Reduction, name: str | None, *, grouped: bool
) -> list[tf.Tensor]:
    require_values(reduction)
    sources = [as_rows(as_tensor(t), "reducescatter") for t in tensors]
    shares = reduce_all("reducescatter", sources, reduction, name, grouped=grouped)
    return [with_unknown_rows(s, like=t) for s, t in zip(shares, sources, strict=True)]


@without_autograph
def gather_all(
    tensors: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
    *,
    grouped: bool,
    op: Op = Average,
) -> list[tf.Tensor]:
    """Gather tensors in one operation.

    Args:
        op: the reduction of the ranks' gradients: Average, as scripts of this API expect, or Sum,
            if the gather is part of a reduction.
    """
    sources = [as_tensor(t) for t in tensors]
    rows = [tf.reshape(t, [1]) if t.shape.rank == 0 else t for t in sources]
    names, group = names_and_group("allgather", name, len(rows), grouped=grouped)
    operations = [ops.operation("allgather", n, process_set, op=op, group=group) for n in names]
    made = run("qsgd_allgather", operations, tensors=rows)
    return [with_unknown_rows(g, like=t) for g, t in zip(made.gathered, rows, strict=True)]


@without_autograph
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return every rank's ``tensor``, concatenated in rank order.

    Its gradient is this rank's rows of the mean of the ranks' output gradients.

    Args:
        tensor: any dtype of fixed size; ranks may differ in the first dimension only. Scalars
            count as one row each.
        name: pairs the calls of the ranks; default: by order, or in a graph by their position.
        ignore_name_scope: accepted for compatibility; names have no scope here.
        process_set: the participating ranks; default: all.
    Raises:
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    return gather_all([tensor], name, process_set, grouped=False)[0]


@without_autograph
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gather several tensors, which complete or fail together; see :func:`allgather`."""
    return gather_all(tensors, name, process_set, grouped=True) if tensors else []


@without_autograph
def broadcast_all(
    tensors: Sequence[Any], root_rank: int, names: Sequence[str | None], process_set: ProcessSet
) -> list[tf.Tensor]:
    """Return root_rank's tensors, in one operation; each has a separate name."""
    operations = [
        ops.operation("broadcast", full_name("broadcast", name), process_set, root=root_rank)
        for name in names
    ]
    received: list[tf.Tensor] = run(
        "qsgd_broadcast", operations, tensors=[as_tensor(t) for t in tensors]
    )
    return received


@without_autograph
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return root_rank's ``tensor``; shapes must be equal.

    Its gradient is the mean of the ranks' output gradients on the root, zeros on the others.

    Args:
        tensor: any dtype of fixed size; unchanged.
        root_rank: a rank of the job that is in the process set.
        name: pairs the calls of the ranks; default: by order, or in a graph by their position.
        ignore_name_scope: accepted for compatibility; names have no scope here.
        process_set: the participating ranks; default: all.
    Raises:
        UsageError: root_rank is not in the set.
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    return broadcast_all([tensor], root_rank, [name], process_set)[0]


@without_autograph
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Replace variables by root_rank's; see :func:`broadcast`.

    Returns:
        The variables, or in a graph the operations that assign to them.
    """
    group = list(variables)
    if not group:
        return []
    names = [name and f"{name}.{i}" for i in range(len(group))]
    received = broadcast_all(group, root_rank, names, process_set)
    return [v.assign(value) for v, value in zip(group, received, strict=True)]


@without_autograph
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send some rows of ``tensor`` to each rank; return the received rows, in rank order.

    Its gradient is the output gradient, sent back to the ranks of the rows.

    Args:
        tensor: at least one dimension; ranks may differ in the first one only.
        splits: number of rows for each rank of the process set, as a list or tensor; None
            sends the same number to each.
        name: pairs the calls of the ranks; default: by order, or in a graph by their position.
        ignore_name_scope: accepted for compatibility; names have no scope here.
        process_set: the participating ranks; default: all.
    Returns:
        The rows and, if ``splits`` were passed, the number of rows from each rank, as int32.
    Raises:
        UsageError: the sum of splits is not the number of rows (a ValueError, on this rank).
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    source = as_rows(as_tensor(tensor), "alltoall")
    parts = _whole_numbers(() if splits is None else splits)
    operations = [ops.operation("alltoall", full_name("alltoall", name), process_set)]
    made = run("qsgd_alltoall", operations, tensors=[source], splits=parts)
    received = with_unknown_rows(made.received[0], like=source)
    if splits is None:
        return received
    return received, tf.cast(made.rows[0], tf.int32)


def _whole_numbers(splits: Any) -> tf.Tensor:
    # TensorFlow takes the type of an empty list for float32.
    empty = isinstance(splits, Sequence) and not splits
    numbers = tf.convert_to_tensor(splits, tf.int64 if empty else None)
    if not numbers.dtype.is_integer:
        raise UsageError(f"alltoall with splits= of type {numbers.dtype.name}: pass integers")
    return tf.cast(numbers, tf.int64)


@without_autograph
def join() -> tf.Tensor:
    """Announce that this rank has no more data; return the last rank (int32) when all have joined.

    Until then it contributes zeros to the others' allreduces, which count in averages.
    Other collectives raise on the ranks that have not joined.
    """
    if tf.executing_eagerly():
        return tf.constant(ops.join(), tf.int32)
    last: tf.Tensor = run("qsgd_join", [ops.operation("join", "")])
    return last


def _op(fact: Callable[[], int], name: str | None) -> tf.Tensor:
    result: tf.Tensor = tf.numpy_function(lambda: np.int32(fact()), [], tf.int32, name=name)
    result.set_shape([])
    return result


@without_autograph
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank in the job, from 0, as an int32 scalar."""
    return _op(basics.rank, name)


@without_autograph
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank on its node, from 0, as an int32 scalar."""
    return _op(basics.local_rank, name)


@without_autograph
def size_op(process_set_id: int | ProcessSet = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of processes of the job, or of a process set, as an int32 scalar."""
    return _op(lambda: len(_ranks(process_set_id)), name)


@without_autograph
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of processes on this node, as an int32 scalar."""
    return _op(basics.local_size, name)


@without_autograph
def process_set_included_op(
    process_set_id: int | ProcessSet = 0, name: str | None = None
) -> tf.Tensor:
    """Return 1 if this rank is in the process set, else 0, as an int32 scalar."""
    return _op(lambda: int(basics.rank() in _ranks(process_set_id)), name)


def _ranks(process_set: int | ProcessSet) -> list[int]:
    known = process_set_ids_and_ranks()
    number = process_set if isinstance(process_set, int) else process_set.process_set_id
    if number not in known:
        raise UsageError(f"process set {number} is not registered; known sets: {sorted(known)}")
    return known[number]
