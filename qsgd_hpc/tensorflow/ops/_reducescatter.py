"""``reducescatter``: every rank gets its part of the rows of a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from qsgd_hpc.frameworks.reduction import Reduction, reduction_of, require_values
from qsgd_hpc.runtime.ops import Op
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.tensorflow.compression import Compression
from qsgd_hpc.tensorflow.ops._autograph import without_autograph
from qsgd_hpc.tensorflow.ops._reduction import reduce_all
from qsgd_hpc.tensorflow.ops._shapes import as_rows, with_unknown_rows

__all__ = ["grouped_reducescatter", "reducescatter"]


@without_autograph
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Op | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
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
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
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
    sources = [as_rows(tf.convert_to_tensor(t), "reducescatter") for t in tensors]
    shares = reduce_all("reducescatter", sources, reduction, name, grouped=grouped)
    return [with_unknown_rows(s, like=t) for s, t in zip(shares, sources, strict=True)]
