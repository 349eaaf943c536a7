"""Keras on TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from qsgd_hpc._base.gradient_reduction import GradientReduction
from qsgd_hpc.keras._backend import Reducer
from qsgd_hpc.ops import Min
from qsgd_hpc.tensorflow.compression import Compression
from qsgd_hpc.tensorflow.gradients import reduce_gradients
from qsgd_hpc.tensorflow.ops import allreduce

__all__ = [
    "EAGER_VALUES",
    "Compression",
    "all_ranks_agree",
    "complete",
    "have_values",
    "outside_of_graphs",
    "reducer",
    "scaled",
]

EAGER_VALUES = True
outside_of_graphs = tf.init_scope


def reducer(reduction: GradientReduction, groups: Any) -> Reducer:
    """Return what reduces the gradients of one optimizer while the backward pass goes on."""

    def reduce(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        reduced: list[Any] = reduce_gradients(gradients, variables, reduction, groups=groups)
        return reduced

    return reduce


def complete(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return the gradients: what a traced step lacks, it lacks on every rank."""
    return list(gradients)


def all_ranks_agree(yes: Any, reduction: GradientReduction) -> Any:
    """Return whether a boolean tensor is true on every rank."""
    count = tf.cast(yes, tf.int32)
    least = allreduce(count, name="finite", op=Min, process_set=reduction.process_set)
    return tf.cast(least, tf.bool)


def scaled(gradient: Any, factor: float) -> Any:
    """Return a gradient, dense or sparse, times a factor."""
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def have_values(variables: Sequence[Any]) -> bool:
    """Tell whether variables have values; one made while a step is traced gets its own later."""
    with tf.init_scope():
        natives = [getattr(v, "value", v) if _is_keras(v) else v for v in variables]
        return all(bool(v.is_initialized()) for v in natives)


def _is_keras(variable: Any) -> bool:
    return not isinstance(variable, tf.Variable)
