"""``DistributedGradientTape``: a tape whose gradients are averaged over the ranks."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.grouping import choose_groups
from qsgd_hpc.frameworks.reduction import GradientReduction, checked_reduction
from qsgd_hpc.runtime.ops import Average, Op
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.tensorflow.gradients import Groups, LocalSources, reduce_gradients
from qsgd_hpc.tensorflow.ops._run import without_autograph

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


class _Distributed(tf.GradientTape):  # type: ignore[misc]
    """Methods added to a wrapped tape."""

    _reduction: GradientReduction
    _groups: Groups
    _local: LocalSources
    _name: str

    @without_autograph
    def register_local_source(self, source: Any) -> None:
        """Do not reduce the gradient of a variable; see ``scale_local_gradients``."""
        self._local.add(source)

    @without_autograph
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        *,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the wrapped tape's gradients, averaged over the ranks; see ``tf.GradientTape``.

        ``use_generic_names`` pairs the ranks' gradients by their order, without those of local
        sources, instead of by the variables' names, which may then differ.
        """
        own = super().gradient(target, sources, output_gradients, unconnected_gradients)
        reduced = reduce_gradients(
            tf.nest.flatten(own),
            tf.nest.flatten(sources),
            self._reduction,
            groups=self._groups,
            local=self._local,
            name=self._name,
            numbered=use_generic_names,
        )
        return tf.nest.pack_sequence_as(own, reduced)


@functools.cache  # because scripts wrap a tape in every step
def _class_for(kind: Any) -> type[_Distributed]:
    return type(kind.__name__, (_Distributed, kind), {})


@without_autograph
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    name: str = "gradient",
) -> Any:
    """Wrap a tape so that ``gradient`` returns the average of all ranks' gradients.

    Args:
        gradtape: a ``tf.GradientTape``, before, in or after its ``with`` block.
        device_dense: accepted for compatibility; a gradient is reduced on its own device.
        device_sparse: likewise.
        compression: one of ``hvd.Compression``; None uses ``QSGD_BITS`` or ``QSGD_SCHEME``,
            else no compression.
        sparse_as_dense: makes ``tf.IndexedSlices`` dense before they are reduced; else all ranks'
            entries are gathered, uncompressed, which is efficient if there are few.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: splits the average: gradients are divided by it before the
            sum and by size / factor after it, which keeps sums of float16 in range.
        num_groups: deprecated: a number for ``groups``.
        groups: number of groups of neighbouring sources to reduce together, or the groups as lists
            of variables.
        process_set: the ranks that average; ranks outside the set train separately.
        scale_local_gradients: divide gradients of local sources by the number of ranks, as the
            average does with all others.
        name: prefix of the operations' names; models with variables of equal names need two if
            two threads train them, and for separate error feedback.
    Returns:
        A tape of the same class that shares the wrapped tape's records, with
        ``register_local_source``.
    Raises:
        UsageError: arguments out of range.
    """
    reduction = checked_reduction(
        op,
        compression,
        gradient_predivide_factor,
        sparse_as_dense,
        process_set,
        caller="DistributedGradientTape",
    )
    if isinstance(gradtape, _Distributed):
        raise UsageError("this tape is already a DistributedGradientTape; wrap it once")
    kind: Any = type(gradtape)
    tape = object.__new__(_class_for(kind))
    # Both share one state, because the script may use either in its ``with`` statement.
    tape.__dict__ = gradtape.__dict__
    tape._reduction = reduction
    tape._groups = choose_groups(num_groups, groups)
    tape._local = LocalSources(scale_local_gradients)
    tape._name = name
    return tape


@without_autograph
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    *,
    name: str = "gradient",
) -> Any:
    """Wrap a tape like ``DistributedGradientTape``, but do not reduce some layers' gradients.

    Args:
        local_layers: one or several Keras layers, already built, whose gradients stay rank-local.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        name=name,
    )
    tape._local.add_layers(local_layers or [])
    return tape
