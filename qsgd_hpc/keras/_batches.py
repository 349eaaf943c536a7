"""Counting of batches in callbacks."""

from __future__ import annotations

from typing import Any

import keras

__all__ = ["BatchCounter"]


class BatchCounter(keras.callbacks.Callback):
    """Base class of callbacks that act after a number of batches.

    With ``steps_per_execution``, Keras calls ``on_train_batch_end`` for the last of several batches
    only.
    """

    _last = -1

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start counting batches from 0, as ``fit`` does."""
        self._last = -1

    def advance(self, batch: int) -> int:
        """Return the batch of the call before, -1 in the first of an epoch; remember this one."""
        last, self._last = self._last, batch
        return last
