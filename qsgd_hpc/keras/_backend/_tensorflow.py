"""Keras on TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from qsgd_hpc.frameworks.reduction import GradientReduction
from qsgd_hpc.keras._backend import Backend, Reducer
from qsgd_hpc.runtime.ops import Min
from qsgd_hpc.tensorflow.compression import Compression
from qsgd_hpc.tensorflow.gradients import reduce_gradients
from qsgd_hpc.tensorflow.ops import allreduce
from qsgd_hpc.tensorflow.ops._names import distinct_in_graph, unwrapped

__all__ = ["BACKEND"]


class _TensorFlow(Backend):
    Compression = Compression

    def reducer(self, reduction: GradientReduction, groups: Any) -> Reducer:
        """Return a reducer of one optimizer's gradients that runs during the backward pass."""
        return functools.partial(reduce_gradients, reduction=reduction, groups=groups)

    def all_ranks_agree(self, yes: Any, name: str, reduction: GradientReduction) -> Any:
        count = tf.cast(yes, tf.int32)
        distinct = name if tf.executing_eagerly() else distinct_in_graph(name)
        least = allreduce(count, name=distinct, op=Min, process_set=reduction.process_set)
        return tf.cast(least, tf.bool)

    def scaled(self, gradient: Any, factor: float) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values * tf.cast(factor, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient * tf.cast(factor, gradient.dtype)

    def outside_of_graphs(self) -> AbstractContextManager[Any]:
        scope: AbstractContextManager[Any] = tf.init_scope()
        return scope

    def have_values(self, variables: Sequence[Any]) -> bool:
        """Return whether all are initialised; variables created during tracing are not yet."""
        with tf.init_scope():
            return all(bool(unwrapped(v).is_initialized()) for v in variables)


BACKEND = _TensorFlow()
