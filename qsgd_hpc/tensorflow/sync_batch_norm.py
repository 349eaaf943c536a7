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

# Of the layers of TensorFlow 2 that this one replaces, and what they did by default.
_FORMER = {
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
        kwargs: those of ``BatchNormalization``, of TensorFlow 2's as of Keras 3's.
    Raises:
        UsageError: Keras computes with another backend than TensorFlow, or its
            ``BatchNormalization`` cannot do what an argument of TensorFlow 2 asks for.
    """

    def __init__(
        self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any
    ) -> None:
        if keras.config.backend() != "tensorflow":
            raise UsageError(
                f"SyncBatchNormalization with Keras on {keras.config.backend()}: set "
                "KERAS_BACKEND=tensorflow, or on torch use qsgd_hpc.torch.SyncBatchNorm"
            )
        super().__init__(**_without_former(kwargs))
        self.process_set = process_set
        self.supports_jit = False  # Keras then leaves XLA off where it may choose

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean and variance of each channel, over all ranks.

        Squares are taken of deviations from the mean of all, which does not cancel as a
        difference of sums would.
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


def _without_former(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without those that this Keras no longer has."""
    known = inspect.signature(keras.layers.BatchNormalization).parameters
    gone = {name: options[name] for name in options if name in _FORMER and name not in known}
    for name, value in gone.items():
        if value != _FORMER[name]:
            raise UsageError(
                f"SyncBatchNormalization({name}={value!r}): Keras {keras.__version__} has no "
                f"such option; remove {name}"
            )
    return {name: value for name, value in options.items() if name not in gone}
