"""Variables whose gradients are not reduced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from qsgd_hpc.tensorflow.ops._names import unwrapped

__all__ = ["LocalSources"]


class LocalSources:
    """Variables that belong to one rank, such as its part of a large embedding.

    Args:
        scale: divide their gradients by the number of ranks, as the average does for shared
            variables, so that both have the same scale.
    """

    def __init__(self, scale: bool = True) -> None:
        self._scale = scale
        self._sources: dict[int, Any] = {}  # by id; keeps them alive, so that no id is reused

    def add(self, source: Any) -> None:
        """Exclude a variable from now on."""
        own = unwrapped(source)
        self._sources[id(own)] = own

    def add_layers(self, layers: Any) -> None:
        """Exclude the trainable variables of one or several Keras layers."""
        for layer in layers if isinstance(layers, Iterable) else [layers]:
            for variable in layer.trainable_weights:
                self.add(variable)

    def __contains__(self, source: Any) -> bool:
        return id(unwrapped(source)) in self._sources

    def scaled(self, gradient: Any, size: int) -> Any:
        """Return the gradient of a local source, divided by the number of ranks if ``scale``."""
        if gradient is None or not self._scale or size == 1:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
        return gradient / size
