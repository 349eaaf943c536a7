"""``allreduce`` of dense and sparse tensors, single or in groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from qsgd_hpc.errors import UnsupportedError
from qsgd_hpc.frameworks.reduction import Reduction, reduction_of
from qsgd_hpc.runtime.ops import Average, Op, Sum, ranks_of
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.tensorflow.compression import Compression
from qsgd_hpc.tensorflow.ops._allgather import gather_all
from qsgd_hpc.tensorflow.ops._autograph import without_autograph
from qsgd_hpc.tensorflow.ops._reduction import reduce_all

__all__ = ["allreduce", "grouped_allreduce"]

Slices = tf.IndexedSlices


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
    Raises:
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
        UnsupportedError: sparse tensors with another op than Average or Sum.
    """
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    if isinstance(tensor, Slices):
        return _allreduce_sparse(tensor, reduction, name)
    dense = tf.convert_to_tensor(tensor)
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
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several tensors, which complete or fail together; see :func:`allreduce`.

    ``tf.IndexedSlices`` among them are gathered separately.
    """
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    dense = [tf.convert_to_tensor(t) for t in tensors if not isinstance(t, Slices)]
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
