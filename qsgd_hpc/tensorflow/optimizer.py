"""``DistributedOptimizer`` of TF1's optimizers; Keras's are passed to :mod:`qsgd_hpc.keras`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.gradient_reduction import checked_reduction
from qsgd_hpc.frameworks.grouping import choose_groups
from qsgd_hpc.frameworks.pending import checked_passes
from qsgd_hpc.runtime.ops import Average, Op
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.tensorflow.gradients import Groups
from qsgd_hpc.tensorflow.graph_optimizer import GraphOptimizer

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap an optimizer so that every step uses the average of all ranks' gradients.

    Args:
        optimizer: one of ``tf.compat.v1.train``, or one of Keras.
        name: name of the wrapper; default: "Distributed" and the optimizer's name.
        use_locking: accepted for compatibility; the wrapped optimizer's own setting is used.
        device_dense: accepted for compatibility; a gradient is reduced on its own device.
        device_sparse: likewise.
        compression: one of ``hvd.Compression``; None uses ``QSGD_BITS`` or ``QSGD_SCHEME``,
            else no compression.
        sparse_as_dense: makes ``tf.IndexedSlices`` dense before they are reduced; else all ranks'
            entries are gathered, uncompressed, which is efficient if there are few.
        backward_passes_per_step: number of steps whose gradients are summed, dense, before a
            reduction; variables and ``global_step`` change with the last of them.
        op: Average, Sum, or Adasum. With Adasum, each rank executes the optimizer's step with
            its own gradients and the ranks' steps are combined.
        gradient_predivide_factor: splits the average: gradients are divided by it before the
            sum and by size / factor after it, which keeps sums of float16 in range.
        average_aggregated_gradients: divide the sums by ``backward_passes_per_step``.
        num_groups: deprecated: a number for ``groups``.
        groups: number of groups of neighbouring variables to reduce together, or the groups as
            lists of variables.
        process_set: the ranks that average; ranks outside the set train separately.
        scale_local_gradients: divide gradients of local sources by the number of ranks, as the
            average does with all others.
    Returns:
        An optimizer of the same kind, with ``register_local_source``.
    Raises:
        UsageError: not an optimizer of these kinds, or arguments out of range.
    """
    passes = checked_passes(backward_passes_per_step)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if isinstance(optimizer, GraphOptimizer):
            raise UsageError("this optimizer is already a DistributedOptimizer; wrap it once")
        reduction = checked_reduction(
            op, compression, gradient_predivide_factor, sparse_as_dense, process_set
        )
        return GraphOptimizer(
            optimizer,
            reduction,
            name=name,
            passes=passes,
            mean_of_passes=average_aggregated_gradients,
            groups=choose_groups(num_groups, groups),
            scale_local_gradients=scale_local_gradients,
        )
    if isinstance(optimizer, tf.keras.optimizers.Optimizer):
        from qsgd_hpc import keras

        return keras.DistributedOptimizer(
            optimizer,
            name=name,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            backward_passes_per_step=passes,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            average_aggregated_gradients=average_aggregated_gradients,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    raise UsageError(
        f"DistributedOptimizer({type(optimizer).__name__}): pass an optimizer of "
        "tf.compat.v1.train or of tf.keras.optimizers"
    )
