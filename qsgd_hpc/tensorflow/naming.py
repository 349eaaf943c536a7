"""Names of operations: equal on every rank, and unique among concurrent operations."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from qsgd_hpc.runtime import basics
from qsgd_hpc.tensorflow.ops._names import distinct_in_graph, numbered

__all__ = ["name_of", "operation_names", "unwrapped", "warn_of_threads"]

# The variable and the thread that have used a name last.
_users: dict[str, tuple[weakref.ref[Any], weakref.ref[threading.Thread]]] = {}


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


def warn_of_threads(names: Sequence[str], variables: Sequence[Any]) -> None:
    """Warn if two threads reduce the gradients of different variables under one name."""
    if threading.active_count() == 1:
        return
    thread = threading.current_thread()
    for name, variable in zip(names, map(unwrapped, variables), strict=True):
        last, other = (ref() for ref in _users.get(name, (_nothing, _nothing)))
        if last is variable and other is thread:
            continue
        _users[name] = weakref.ref(variable), weakref.ref(thread)
        shared = last is not None and last is not variable
        alive = other is not None and other is not thread and other.is_alive()
        if shared and alive and basics.rank() == 0:
            warnings.warn(
                f"two threads reduce gradients of different variables as {name!r}: at the same "
                "time, ranks may mix them; pass DistributedGradientTape(name=) in one of the "
                "threads, or name the variables differently",
                stacklevel=3,
            )
            return


def _nothing() -> None:
    """Stand in for a reference to what is gone."""
