"""Static shapes of tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from qsgd_hpc.errors import UsageError

__all__ = ["as_rows", "with_unknown_rows"]


def as_rows(tensor: tf.Tensor, operation: str) -> tf.Tensor:
    """Return the tensor, which must have a first dimension to be cut along."""
    if tensor.shape.rank == 0:
        raise UsageError(
            f"{operation} splits tensors along the first dimension, which a scalar does not "
            "have; pass tf.reshape(tensor, [1])"
        )
    return tensor


def with_unknown_rows(result: tf.Tensor, like: Any) -> tf.Tensor:
    """Tell TensorFlow the shape of a result: as its source's, but for the first dimension."""
    if like.shape.rank and not tf.executing_eagerly():
        result.set_shape([None, *like.shape[1:]])
    return result
