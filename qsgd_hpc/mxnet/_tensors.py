"""Conversion of MXNet arrays to the core's memory and back, by DLPack and numpy."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from qsgd_hpc.errors import UsageError

__all__ = ["as_tensor", "on_host", "view_of"]


class _Producer:
    """The two methods of the DLPack protocol, which MXNet 1.9 lacks although it has capsules."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        # Blocks until no pending operation of MXNet reads or writes the array.
        return self._tensor.to_dlpack_for_write()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the host


class _Memory:
    """Writable memory for numpy, because numpy 1.23 makes all DLPack arrays read-only."""

    def __init__(self, view: NDArray[Any]) -> None:
        self.__array_interface__ = {
            **view.__array_interface__,
            "data": (view.ctypes.data, False),
        }
        self._view = view  # keeps the memory alive


def on_host(tensor: Any) -> Any:
    """Return the array itself, or a copy on the host if it is on a GPU.

    Raises:
        UsageError: not an array of MXNet.
    """
    if not isinstance(tensor, mx.nd.NDArray):
        raise UsageError(
            f"collectives of qsgd_hpc.mxnet take arrays of MXNet, not a {type(tensor).__name__}; "
            "pass mx.nd.array(values)"
        )
    return tensor if tensor.ctx.device_type.startswith("cpu") else tensor.as_in_context(mx.cpu())


def view_of(tensor: Any) -> NDArray[Any]:
    """Wait for pending operations on a host array, and return numpy's view of it.

    The array must not be used while the view is in use.

    Raises:
        UsageError: a bool array, which MXNet exports as single bits.
    """
    if tensor.dtype == np.bool_:
        raise UsageError("bool arrays of MXNet cannot be sent; pass tensor.astype('uint8')")
    return np.asarray(_Memory(np.from_dlpack(_Producer(tensor))))


def as_tensor(result: NDArray[Any], like: Any) -> Any:
    """Return a result as an MXNet array of the same kind and on the same device as ``like``."""
    module = mx.np if isinstance(like, mx.np.ndarray) else mx.nd
    return module.array(result, dtype=result.dtype, ctx=like.ctx)
