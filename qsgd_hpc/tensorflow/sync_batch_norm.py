"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import tensorflow as tf

from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime.ops import Sum
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.tensorflow.ops import allreduce

__all__ = ["SyncBatchNormalization"]

# Options of TensorFlow 2's layer that newer Keras lacks, and their defaults.
_REMOVED = {
    "renorm": False,
    "renorm_clipping": None,
    "renorm_momentum": 0.99,
    "virtual_batch_size": None,
    "adjustment": None,
}


@keras.saving.register_keras_serializable(package="qsgd_hpc")  # type: ignore[untyped-decorator]
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """``keras.layers.BatchNormalization`` over the batches of all ranks, as if they were one.

    Gradients are those of the sum of all ranks' losses. In inference it is plain batch
    normalisation and sends nothing.

    Args:
        fused: accepted for compatibility; there is only one implementation.
        process_set: the ranks whose batches are included; default: all. Batch sizes may differ.
            It is not saved with a model.
        kwargs: arguments of ``BatchNormalization``, in TensorFlow 2 or Keras 3.
    Raises:
        UsageError: the backend of Keras is not TensorFlow, or this Keras does not support an
            option of TensorFlow 2.
    """

    def __init__(
        self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any
    ) -> None:
        if keras.config.backend() != "tensorflow":
            raise UsageError(
                f"SyncBatchNormalization with Keras on {keras.config.backend()}: set "
                "KERAS_BACKEND=tensorflow, or on torch use qsgd_hpc.torch.SyncBatchNorm"
            )
        super().__init__(**_without_removed(kwargs))
        self.process_set = process_set
        self.supports_jit = False  # prevents jit_compile="auto" from selecting XLA

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean and variance of each channel, over all ranks.

        Sums squares of deviations from the mean over all ranks, which avoids the cancellation of a
        difference of sums.
        """
        if self.process_set.size() == 1:
            moments: tuple[tf.Tensor, tf.Tensor] = super()._moments(inputs, mask)
            return moments
        axes = self._reduction_axes
        weights = tf.ones_like(inputs)
        if mask is not None:
            weights = weights * tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
        totals = self._sum([tf.reduce_sum(weights * inputs, axes), tf.reduce_sum(weights, axes)])
        count = tf.maximum(totals[1], 1.0)
        mean = totals[0] / count
        wide = [1] * len(inputs.shape)
        wide[self.axis] = -1
        deviations = inputs - tf.reshape(mean, wide)
        (squares,) = self._sum([tf.reduce_sum(weights * deviations * deviations, axes)])
        return mean, squares / count

    def _sum(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        summed = allreduce(tf.stack(values), op=Sum, process_set=self.process_set)
        return [summed[i] for i in range(len(values))]


def _without_removed(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without those that this Keras lacks; these must have their defaults."""
    known = inspect.signature(keras.layers.BatchNormalization).parameters
    gone = {name: options[name] for name in options if name in _REMOVED and name not in known}
    for name, value in gone.items():
        if value != _REMOVED[name]:
            raise UsageError(
                f"SyncBatchNormalization({name}={value!r}): Keras {keras.__version__} has no "
                f"such option; remove {name}"
            )
    return {name: value for name, value in options.items() if name not in gone}
