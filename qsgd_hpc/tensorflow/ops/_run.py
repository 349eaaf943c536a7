"""Runs the library's operations: eagerly, or as part of a graph."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from qsgd_hpc import _core
from qsgd_hpc.errors import (
    HorovodInternalError,
    NonFiniteGradientError,
    QsgdError,
    RankFailedError,
    UsageError,
)
from qsgd_hpc.tensorflow._library import library

__all__ = ["as_own_error", "facts_of", "run"]

Facts = Mapping[str, Any]

# The library gives each kind of error a code of its own; see csrc/tensorflow/call.cc.
_KINDS: dict[type[tf.errors.OpError], type[QsgdError]] = {
    tf.errors.InvalidArgumentError: UsageError,
    tf.errors.UnknownError: RankFailedError,
    tf.errors.DataLossError: NonFiniteGradientError,
}
_PREFIX = re.compile(r"^\{\{function_node [^}]*\}\}\s*")
_SUFFIX = re.compile(r"\s*\[Op:\w+\].*$", re.DOTALL)


def run(operation: str, facts: Sequence[Facts], **inputs: Any) -> Any:
    """Run an operation, with the facts of each tensor (see :mod:`qsgd_hpc._facts`).

    Raises:
        HorovodInternalError: the ranks disagree, or a rank died (from a graph it is a
            ``tf.errors.OpError`` with the same text).
        UsageError: in a function that XLA is to compile.
    """
    eager = tf.executing_eagerly()
    if not eager:
        _refuse_xla(facts[0]["kind"])
    packed = b" ".join(_core.operation_facts(**f) for f in facts)
    try:
        made = getattr(library(), operation)(facts=packed, **inputs)
    except tf.errors.OpError as error:
        if not eager:
            raise
        raise as_own_error(error) from None
    if not eager:
        _let_run_in_any_order(made)
    return made


def as_own_error(error: tf.errors.OpError) -> QsgdError:
    """Return the error of this package that TensorFlow has made its own of."""
    text = _SUFFIX.sub("", _PREFIX.sub("", error.message))
    return _KINDS.get(type(error), HorovodInternalError)(text)


def facts_of(operation: Any) -> list[dict[str, Any]]:
    """Return the facts that an operation of a graph, or of a tape, was run with."""
    return [_core.read_operation_facts(f) for f in operation.get_attr("facts").split()]


def _refuse_xla(kind: str) -> None:
    from tensorflow.python.ops import control_flow_util

    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UsageError(
            f"{kind} in a function with jit_compile=True: XLA cannot compile what waits for other "
            "ranks. Pass jit_compile=False (Keras: compile(..., jit_compile=False)), or compile "
            "the model's own functions and call hvd outside of them"
        )


def _let_run_in_any_order(made: Any) -> None:
    """Let a collective overlap with others: they find each other by name.

    TensorFlow runs operations with side effects one after the other in a ``tf.function``.
    """
    first = tf.nest.flatten(made)[0]
    manager = getattr(first.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(first.op)
