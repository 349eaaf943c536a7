"""Names of operations: equal on every rank, and unique among concurrent operations."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from qsgd_hpc.tensorflow.ops._names import distinct_in_graph, numbered

__all__ = ["name_of", "operation_names", "unwrapped"]


def unwrapped(variable: Any) -> Any:
    """Return the TensorFlow variable of a Keras variable; other values are returned unchanged."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def name_of(variable: Any) -> str:
    """Return the name of a variable, without TensorFlow's output number."""
    # Keras's names are unique only within a layer, its paths in the model. Eager tensors have
    # neither.
    name = getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor"
    return str(name).partition(":")[0]


def operation_names(prefix: str, variables: Sequence[Any]) -> list[str]:
    """Return an unused name for an operation on each of these variables."""
    wanted = tuple(prefix + name_of(variable) for variable in variables)
    if tf.executing_eagerly():
        return _distinct(wanted)
    return [distinct_in_graph(name) for name in wanted]


@functools.lru_cache(maxsize=256)
def _distinct(names: tuple[str, ...]) -> list[str]:
    seen: Counter[str] = Counter()
    return [numbered(name, seen) for name in names]
