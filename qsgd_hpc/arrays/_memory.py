"""Conversion of any array to the core's memory and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.adapter import Adapter
from qsgd_hpc.runtime import ops

__all__ = ["ARRAYS", "Arrays", "is_floating", "view_of", "writable_view_of"]

Array = NDArray[Any]

_DLPACK_CPU = 1


def view_of(array: Any) -> Array:
    """Return a numpy view of an array's memory, or of a copy if it is not exposed.

    Args:
        array: a numpy array, an object with DLPack, the buffer protocol or ``__array__``;
            a number, or a list of numbers.
    Raises:
        UsageError: it is on a device, or contains Python objects.
    """
    view = _shared(array)
    if view is None:
        view = np.asarray(array)
    if view.dtype.hasobject:
        raise UsageError(
            f"an array of {view.dtype} contains Python objects, whose addresses are not valid "
            "on other ranks; use allgather_object or broadcast_object"
        )
    return view


def writable_view_of(array: Any, operation: str) -> Array:
    """Return a numpy view of an array that will be replaced.

    Raises:
        UsageError: it is not writable.
    """
    view = _shared(array)
    if view is not None and view.flags.writeable:
        return view
    what = "does not expose its memory" if view is None else "is read-only"
    raise UsageError(
        f"{operation} replaces its argument, but this {type(array).__name__} {what}; use "
        f"{operation.rstrip('_')}, which returns a new array"
    )


def _shared(array: Any) -> Array | None:
    """Return a view of the array's memory, or None if it is not exposed."""
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
            f"this {type(array).__name__} cannot be read through DLPack ({error}); pass a copy "
            "in host memory, of a type that numpy supports"
        ) from None


def _on_host(array: Any) -> bool:
    return int(array.__dlpack_device__()[0]) == _DLPACK_CPU


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Return whether codes and casts apply to a type."""
    return dtype.kind == "f" or str(dtype) == "bfloat16"


class Arrays(Adapter):
    """Adapter of numpy arrays."""

    word = "array"
    conversion = "astype()"

    def readable(self, tensor: Array) -> Array:
        return np.asarray(tensor, order="C")

    def shares(self, readable: Array, tensor: Array) -> bool:
        return np.may_share_memory(readable, tensor)

    def dtype(self, tensor: Array) -> str:
        return str(tensor.dtype)

    def itemsize(self, readable: Array) -> int:
        return readable.dtype.itemsize

    def address(self, readable: Array) -> int:
        return readable.ctypes.data

    def cast(self, readable: Array, dtype: str) -> Array:
        return readable.astype(dtype)

    def new_like(self, readable: Array) -> Array:
        return np.empty_like(readable)

    def copied(self, readable: Array) -> Array:
        copy = self.new_like(readable)
        copy[...] = readable
        return copy

    def taken(self, received: ops.Received, like: Array) -> Array:
        made: Array = received.data.view(like.dtype)
        return made.reshape(received.shape[0], *like.shape[1:])

    def delivered(self, result: Any, like: Array, into: Array | None = None) -> Array:
        if into is None:
            return np.asarray(result).astype(like.dtype, copy=False)
        if result is not into:
            into[...] = result
        return into


ARRAYS = Arrays()
