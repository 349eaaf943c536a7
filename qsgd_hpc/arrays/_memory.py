"""The way of any array to the core and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsgd_hpc import ops
from qsgd_hpc.errors import UsageError

__all__ = [
    "array_from", "as_rows", "buffer_of", "is_floating", "moved_buffer_of", "view_of",
    "writable_view_of",
]  # fmt: skip

Array = NDArray[Any]

# What the core computes with; numpy gets bfloat16 from ml_dtypes, which JAX and TensorFlow import.
_KNOWN = frozenset(
    {"uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
)
# Types that it does not compute with travel as integers of their size.
_SAME_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_DLPACK_CPU = 1


def view_of(array: Any) -> Array:
    """Return numpy's view of an array's memory, or of a copy where it shows none.

    Args:
        array: of numpy, or anything with DLPack, with the buffer protocol, or with ``__array__``;
            numbers and lists of them.
    Raises:
        UsageError: it lies on a device, or holds Python objects.
    """
    view = _shared(array)
    if view is None:
        view = np.asarray(array)
    if view.dtype.hasobject:
        raise UsageError(
            f"an array of {view.dtype} holds addresses of Python objects, which mean nothing on "
            "other ranks; use allgather_object or broadcast_object"
        )
    return view


def writable_view_of(array: Any, operation: str) -> Array:
    """Return numpy's view of an array that is to be replaced.

    Raises:
        UsageError: it cannot be written to.
    """
    view = _shared(array)
    if view is not None and view.flags.writeable:
        return view
    what = "shows no memory of its own" if view is None else "is read-only"
    raise UsageError(
        f"{operation} replaces its argument, but this {type(array).__name__} {what}; use "
        f"{operation.rstrip('_')}, which returns a new array"
    )


def _shared(array: Any) -> Array | None:
    """Return a view of the array's own memory, or None where it shows none."""
    if isinstance(array, np.ndarray):
        return np.asarray(array)
    if hasattr(array, "__dlpack__"):
        return _through_dlpack(array)
    try:
        return np.asarray(memoryview(array))
    except (TypeError, ValueError):
        return None


def _through_dlpack(array: Any) -> Array | None:
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError) as error:
        if hasattr(array, "__array__") and _on_host(array):
            return None  # such as bfloat16, of which numpy's DLPack knows nothing
        raise UsageError(
            f"this {type(array).__name__} cannot be read through DLPack ({error}); pass a copy of "
            "it in the host's memory, in a type that numpy has"
        ) from None


def _on_host(array: Any) -> bool:
    return int(array.__dlpack_device__()[0]) == _DLPACK_CPU


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Tell whether codes and casts apply to a type."""
    return dtype.kind == "f" or str(dtype) == "bfloat16"


def buffer_of(array: Array) -> ops.Buffer:
    """Describe to the core what it is to compute with: C-contiguous, of a type that it knows.

    Raises:
        UsageError: no such type.
    """
    dtype = "uint8" if array.dtype == np.bool_ else str(array.dtype)
    if dtype not in _KNOWN:
        raise UsageError(
            f"arrays of {array.dtype} cannot be reduced; convert it to one of "
            f"{', '.join(sorted(_KNOWN))} first"
        )
    return ops.Buffer(array.ctypes.data, array.shape, dtype, array)


def moved_buffer_of(array: Array) -> ops.Buffer:
    """Describe to the core what it moves without computing: any type will do."""
    if str(array.dtype) in _KNOWN:
        return buffer_of(array)
    size = array.dtype.itemsize
    if size in _SAME_SIZE:
        return ops.Buffer(array.ctypes.data, array.shape, _SAME_SIZE[size], array)
    return ops.Buffer(array.ctypes.data, (*array.shape, size), "uint8", array)


def as_rows(array: Array, operation: str) -> Array:
    """Return the array, which must have a first dimension to be cut along."""
    if array.ndim == 0:
        raise UsageError(
            f"{operation} cuts arrays along their first dimension, and a scalar has none; pass "
            "array.reshape(1)"
        )
    return array


def array_from(received: ops.Received, like: Array) -> Array:
    """Return what the core has made, in the type of ``like``; it keeps the memory."""
    return received.data.view(like.dtype).reshape(received.shape[0], *like.shape[1:])
