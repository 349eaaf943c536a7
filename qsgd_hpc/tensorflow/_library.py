"""The library of operations for TensorFlow's graphs, connected to the core."""

from __future__ import annotations

import ctypes
import functools
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import tensorflow as tf

from qsgd_hpc import _core
from qsgd_hpc.errors import UsageError
from qsgd_hpc.tensorflow.errors import make_own_errors

__all__ = ["library"]


@functools.cache
def library() -> Any:
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
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_ops{suffix}")
        if path.exists():
            return path
    raise UsageError(f"{Path(__file__).parent} has no _ops library; reinstall qsgd-hpc")
