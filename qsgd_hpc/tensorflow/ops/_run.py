"""The library of operations for TensorFlow's graphs, and its calls, eagerly or in a graph."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, TypeVar, cast

import tensorflow as tf

from qsgd_hpc import _core
from qsgd_hpc._core import Operation
from qsgd_hpc.errors import UsageError
from qsgd_hpc.tensorflow.errors import make_own_errors

__all__ = ["as_rows", "as_tensor", "operations_of", "run", "with_unknown_rows", "without_autograph"]

F = TypeVar("F", bound=Callable[..., Any])


def without_autograph(function: F) -> F:
    """Return a function that AutoGraph does not convert, including the functions that it calls."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))


def as_tensor(value: Any) -> tf.Tensor:
    """Convert a value to a tensor.

    Raises:
        UsageError: it is ragged or sparse.
    """
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        raise UsageError(
            f"collectives take dense tensors, not a {type(value).__name__}; convert it with "
            "tensor.to_tensor() (ragged) or tf.sparse.to_dense(tensor), or send its parts"
        )
    return tf.convert_to_tensor(value)


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


@functools.cache
def _library() -> Any:
    """Return the module of the operations (``qsgd_allreduce`` and others).

    Raises:
        UsageError: the package was built without the library or for another core, or this
            TensorFlow lacks a function that the library needs.
    """
    path = _path()
    operations = tf.load_op_library(str(path))
    loaded = ctypes.CDLL(str(path))
    loaded.qsgd_tensorflow_missing.restype = ctypes.c_char_p
    if missing := loaded.qsgd_tensorflow_missing():
        raise UsageError(
            f"TensorFlow {tf.__version__} has no {missing.decode()} in its C API, which the "
            "collectives need; install TensorFlow 2.16 or later"
        )
    table = ctypes.c_void_p(_core.foreign_table_address())
    if not loaded.qsgd_tensorflow_attach(table):
        raise UsageError(f"{path} is of another build than qsgd_hpc._core; reinstall qsgd-hpc")
    make_own_errors()
    return operations


def _path() -> Path:
    folder = Path(__file__).parents[1]
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_ops{suffix}"
        if path.exists():
            return path
    raise UsageError(f"{folder} has no _ops library; reinstall qsgd-hpc")


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
    _core.set_calls_block(eager)
    try:
        made = getattr(_library(), what)(operations=packed, **inputs)
    finally:
        _core.set_calls_block(False)
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
