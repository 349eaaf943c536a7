"""Names of operations, by which the ranks' operations are matched."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import tensorflow as tf

__all__ = ["derived_name", "distinct_in_graph", "full_name", "numbered"]

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
