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

from qsgd_hpc.runtime import basics, ops

__all__ = [
    "derived_name", "distinct_in_graph", "full_name", "name_of", "names_and_group", "numbered",
    "operation_names", "unwrapped", "warn_of_threads",
]  # fmt: skip

# Number of requests for each name. Counted per graph, not per process: a rank that traces a
# function more often than others, for a last batch of another shape, must get the same names.
_seen: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def full_name(kind: str, name: str | None) -> str:
    """Return an operation's name, equal on every rank, or "" for the engine to number it.

    Eager calls without a name are numbered, because ranks make them in the same order. Operations
    of a graph run in any order, so those without a name are named by their position in the graph.
    """
    if name:
        return f"{kind}.{name}"
    if tf.executing_eagerly():
        return ""
    return distinct_in_graph(f"{kind}.{_outermost()[1]}")


def derived_name(name: str, what: str) -> str:
    """Return the name of an operation derived from another, such as its gradient."""
    if not name or tf.executing_eagerly():
        return name and f"{name}.{what}"
    return distinct_in_graph(f"{name}.{what}")


def _outermost() -> tuple[Any, str]:
    """Return the outermost graph that is being built, and the name of its function.

    Names of functions within it (branches, loops) contain numbers that differ between processes.
    """
    graph = tf.compat.v1.get_default_graph()
    eager_outside = tf.compat.v1.executing_eagerly_outside_functions()
    while (outer := getattr(graph, "outer_graph", None)) is not None:
        if eager_outside and not outer.building_function:
            break
        graph = outer
    return graph, getattr(graph, "name", "graph")


def distinct_in_graph(name: str) -> str:
    """Return a name, with a number if it was requested before for the graph being built."""
    return numbered(name, _seen.setdefault(_outermost()[0], Counter()))


def numbered(name: str, seen: Counter[str]) -> str:
    """Count a name in ``seen``; return it, with a number if it was seen before."""
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}.{seen[name]}"


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


def operation_names(prefix: str, names: Sequence[str]) -> list[str]:
    """Return an unused name for an operation on each of the variables with these names."""
    wanted = tuple(prefix + name for name in names)
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


def names_and_group(
    kind: str, name: str | None, count: int, *, grouped: bool
) -> tuple[list[str], ops.Group | None]:
    """Return the names of a call's operations, and the group that they form."""
    text = full_name(kind, name)
    if not grouped:
        return [text], None
    return (ops.member_names(text, count) if text else [""] * count), ops.Group(text, count)
