"""The way of an MXNet array to the core and back: DLPack, through numpy."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from qsgd_hpc.errors import UsageError

__all__ = ["as_tensor", "on_host", "view_of"]


class _Producer:
    """MXNet 1.9 hands out capsules, but lacks the two methods by which numpy asks for them."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        # Returns when no pending operation of MXNet reads or writes the array.
        return self._tensor.to_dlpack_for_write()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the host


class _Memory:
    """Memory that numpy may write to: in 1.23 all that comes through DLPack is read-only."""

    def __init__(self, view: NDArray[Any]) -> None:
        self.__array_interface__ = {
            **view.__array_interface__,
            "data": (view.ctypes.data, False),
        }
        self._view = view  # keeps the memory


def on_host(tensor: Any) -> Any:
    """Return the array itself, or a copy of one that lies on a GPU."""
    return tensor if tensor.ctx.device_type.startswith("cpu") else tensor.as_in_context(mx.cpu())


def view_of(tensor: Any) -> NDArray[Any]:
    """Return numpy's view of an array on the host, when MXNet has done with it.

    Until the caller has done with the view, nothing may be done to the array.

    Raises:
        UsageError: it is of bool, which MXNet exports as single bits.
    """
    if tensor.dtype == np.bool_:
        raise UsageError("bool arrays of MXNet cannot be sent; pass tensor.astype('uint8')")
    return np.asarray(_Memory(np.from_dlpack(_Producer(tensor))))


def as_tensor(result: NDArray[Any], like: Any) -> Any:
    """Return a result as an MXNet array, of the kind and on the device of ``like``."""
    module = mx.np if isinstance(like, mx.np.ndarray) else mx.nd
    return module.array(result, dtype=result.dtype, ctx=like.ctx)
