"""Static shapes of tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from qsgd_hpc.errors import UsageError

__all__ = ["as_rows", "with_unknown_rows"]


def as_rows(tensor: tf.Tensor, operation: str) -> tf.Tensor:
    """Return a tensor after checking that it has a first dimension, along which it is split."""
    if tensor.shape.rank == 0:
        raise UsageError(
            f"{operation} splits tensors along the first dimension, which a scalar does not "
            "have; pass tf.reshape(tensor, [1])"
        )
    return tensor


def with_unknown_rows(result: tf.Tensor, like: Any) -> tf.Tensor:
    """Set a result's static shape to that of ``like``, except for the first dimension."""
    if like.shape.rank and not tf.executing_eagerly():
        result.set_shape([None, *like.shape[1:]])
    return result
