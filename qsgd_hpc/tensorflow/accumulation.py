"""Accumulation of the gradients of several passes, for TF1's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

__all__ = ["Accumulation"]

Reduce = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


@dataclass
class _Sums:
    passes: Any
    """Number of added gradients."""
    totals: list[Any]


class Accumulation:
    """Sums of gradients in variables of the graph, or, in TF2, in variables of this object.

    Args:
        passes: number of passes.
        mean: divide the sums by ``passes``.
    """

    def __init__(self, passes: int, mean: bool) -> None:
        self._passes = passes
        self._mean = mean
        self._complete: Any = None
        self._sums: list[Any] = []
        self._kept: dict[Any, _Sums] = {}

    def _sums_for(self, variables: Sequence[Any]) -> _Sums:
        if not tf.compat.v1.executing_eagerly_outside_functions():
            return _new_sums(variables)  # part of the graph that this call builds
        key = tuple(variable.ref() for variable in variables)
        if key not in self._kept:
            with tf.init_scope():
                self._kept[key] = _new_sums(variables)
        return self._kept[key]

    def add(self, gradients: Sequence[Any], variables: Sequence[Any], reduce: Reduce) -> list[Any]:
        """Add gradients; return the sums, reduced in the last pass of a step."""
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        sums_so_far = self._sums_for([variables[i] for i in present])
        self._sums = sums_so_far.totals
        added = [
            tf.compat.v1.assign_add(total, tf.convert_to_tensor(gradients[i]))
            for total, i in zip(self._sums, present, strict=True)
        ]
        passed = tf.compat.v1.assign_add(sums_so_far.passes, 1)
        self._complete = tf.equal(passed % self._passes, 0)
        factor = 1 / self._passes if self._mean else 1

        def reduced() -> list[Any]:
            return reduce([total * factor for total in added], [variables[i] for i in present])

        sums = tf.cond(self._complete, reduced, lambda: [tf.identity(total) for total in added])
        results = list(gradients)
        for i, total in zip(present, sums, strict=True):
            results[i] = total
        return results

    def when_complete(self, step: Callable[[], Any]) -> Any:
        """Return an operation that executes the step and clears the sums, in a step's last pass."""

        def finish() -> Any:
            done = step()
            with tf.control_dependencies([] if done is None else [done]):  # None: eager mode
                cleared = [tf.compat.v1.assign(s, tf.zeros_like(s)) for s in self._sums]
            with tf.control_dependencies(cleared):
                return tf.constant(True)

        return tf.cond(self._complete, finish, lambda: tf.constant(False))


def _new_sums(variables: Sequence[Any]) -> _Sums:
    passes = tf.compat.v1.Variable(0, trainable=False, name="passes", dtype=tf.int64)
    return _Sums(passes, [_zeros_like(variable) for variable in variables])


def _zeros_like(variable: Any) -> Any:
    name = f"{variable.name.partition(':')[0]}/sum"
    return tf.compat.v1.Variable(
        tf.zeros(variable.shape, variable.dtype.base_dtype), trainable=False, name=name
    )
