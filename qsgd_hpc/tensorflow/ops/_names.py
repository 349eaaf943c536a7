"""Under which names the ranks' operations find each other."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import tensorflow as tf

__all__ = ["distinct_in_graph", "full_name", "numbered", "once_more"]

# How often a name was asked for in a graph. By graph, not by process: a rank that traces a function
# once more than others, for a last batch of another shape, must come to the same names.
_seen: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def full_name(kind: str, name: str | None) -> str:
    """Return an operation's name, equal on every rank, or "" where the engine is to number it.

    That is right for eager calls: ranks make them in one order. Operations of a graph run in any
    order, so those without a name have their place in it for one.
    """
    if name:
        return f"{kind}.{name}"
    if tf.executing_eagerly():
        return ""
    return distinct_in_graph(f"{kind}.{_outermost()[1]}")


def once_more(name: str, what: str) -> str:
    """Return the name of an operation that belongs to another, such as its gradient."""
    if not name or tf.executing_eagerly():
        return name and f"{name}.{what}"
    return distinct_in_graph(f"{name}.{what}")


def _outermost() -> tuple[Any, str]:
    """Return the graph that will run as a whole, and the name of its function.

    Functions within it (branches, loops) are named by numbers that differ between processes.
    """
    graph = tf.compat.v1.get_default_graph()
    eager_outside = tf.compat.v1.executing_eagerly_outside_functions()
    while (outer := getattr(graph, "outer_graph", None)) is not None:
        if eager_outside and not outer.building_function:
            break
        graph = outer
    return graph, getattr(graph, "name", "graph")


def distinct_in_graph(name: str) -> str:
    """Return a name with a number, if the graph that is being built has asked for it before."""
    return numbered(name, _seen.setdefault(_outermost()[0], Counter()))


def numbered(name: str, seen: Counter[str]) -> str:
    """Return a name with a number, if it was seen before, and count it."""
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}.{seen[name]}"
