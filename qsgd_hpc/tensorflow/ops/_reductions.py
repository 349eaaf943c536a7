"""Allreduce and reducescatter of TensorFlow's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from qsgd_hpc._core import Coding
from qsgd_hpc.errors import UnsupportedError
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
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Average, Op, Sum, ranks_of
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.tensorflow.compression import Compression
from qsgd_hpc.tensorflow.ops._moves import gather_all
from qsgd_hpc.tensorflow.ops._names import names_and_group
from qsgd_hpc.tensorflow.ops._run import (
    as_rows,
    as_tensor,
    run,
    with_unknown_rows,
    without_autograph,
)

__all__ = ["allreduce", "grouped_allreduce", "grouped_reducescatter", "reducescatter"]

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
