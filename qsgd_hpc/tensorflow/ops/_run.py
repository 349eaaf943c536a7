"""Execution of the library's operations, eagerly or as part of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import tensorflow as tf

from qsgd_hpc._core import Operation
from qsgd_hpc.errors import UsageError
from qsgd_hpc.tensorflow._library import library

__all__ = ["as_rows", "operations_of", "run", "with_unknown_rows", "without_autograph"]

F = TypeVar("F", bound=Callable[..., Any])


def without_autograph(function: F) -> F:
    """Return a function that AutoGraph does not convert, including the functions that it calls."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))


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


def run(what: str, operations: Sequence[Operation], **inputs: Any) -> Any:
    """Run the library's operation ``what``, which executes one operation of the core per tensor.

    Raises:
        HorovodInternalError: the ranks disagree, or a rank died; see
            :mod:`qsgd_hpc.tensorflow.errors`.
        UsageError: called in a function that XLA compiles.
    """
    eager = tf.executing_eagerly()
    if not eager:
        _refuse_xla(operations[0].kind)
    packed = b" ".join(operation.text() for operation in operations)
    made = getattr(library(), what)(operations=packed, **inputs)
    if not eager:
        _allow_any_order(made)
    return made


def operations_of(made: Any) -> list[Operation]:
    """Return the core's operations of one operation of a graph or tape."""
    return [Operation.of_text(text) for text in made.get_attr("operations").split()]


def _refuse_xla(kind: str) -> None:
    from tensorflow.python.ops import control_flow_util

    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UsageError(
            f"{kind} in a function with jit_compile=True: XLA cannot compile operations that "
            "wait for other ranks. Pass jit_compile=False (Keras: compile(..., "
            "jit_compile=False)), or compile the model's own functions and call hvd outside of "
            "them"
        )


def _allow_any_order(made: Any) -> None:
    """Allow a collective to overlap with others, because the ranks match them by name.

    By default, a ``tf.function`` executes operations with side effects one after the other.
    """
    first = tf.nest.flatten(made)[0]
    manager = getattr(first.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(first.op)
