"""Arrays in the memory of a GPU, accessed through CuPy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import gpu

__all__ = ["current_stream", "is_immutable", "is_on_gpu", "view_on_gpu"]

_DLPACK_GPUS = frozenset({2, 10, 13})  # CUDA, ROCm, and CUDA managed memory


def is_on_gpu(array: Any) -> bool:
    """Return whether an array is in the memory of a GPU."""
    if isinstance(array, np.ndarray):
        return False
    if _is_cupy_array(array):
        return True
    if not hasattr(array, "__dlpack_device__"):
        return hasattr(array, "__cuda_array_interface__")
    try:
        return int(array.__dlpack_device__()[0]) in _DLPACK_GPUS
    except (BufferError, RuntimeError, TypeError):  # for example, an array on several devices
        return False


def is_immutable(array: Any) -> bool:
    """Return whether the library of an array on a GPU requires that its values do not change."""
    if type(array).__module__.partition(".")[0] in ("jax", "jaxlib"):  # DLPack does not report it
        return True
    if _is_cupy_array(array) or hasattr(array, "__dlpack_device__"):
        return False
    return bool(array.__cuda_array_interface__["data"][1])


def view_on_gpu(array: Any) -> Any:
    """Return a CuPy array over the memory of an array on a GPU.

    CuPy's current stream waits for work in flight that writes the array; the host does not wait.

    Raises:
        UsageError: CuPy is not installed or does not support the type, or there are no kernels
            for the GPU.
    """
    if _is_cupy_array(array):
        view = array
    elif hasattr(array, "__dlpack__"):
        view = _through_dlpack(array)
    else:
        view = _through_interface(array)
    if gpu.served() != "cuda" or not gpu.serves(view.device.id):
        raise UsageError(
            f"this {type(array).__name__} is on GPU {view.device.id}, for which there are no "
            "kernels (qsgd-hpc doctor); install qsgd-hpc with its compiler (docs/gpu.md), or pass "
            "a copy in host memory"
        )
    return view


def current_stream(array: Any) -> Any:
    """Return CuPy's current stream on the device of a CuPy array."""
    with array.device:
        return _cupy().cuda.get_current_stream()


def _is_cupy_array(array: Any) -> bool:
    cupy = sys.modules.get("cupy")  # if it is not imported, no array is CuPy's
    return cupy is not None and isinstance(array, cupy.ndarray)


def _cupy() -> Any:
    try:
        import cupy  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise UsageError(
            f"arrays on GPUs need CuPy, which cannot be imported ({error}): install it, for CUDA "
            "13 with `pip install cupy-cuda13x`, use the module of your framework, or pass a copy "
            "in host memory"
        ) from None
    return cupy


def _through_dlpack(array: Any) -> Any:
    """Return a view; the array's library makes CuPy's current stream wait for pending writes."""
    cupy = _cupy()
    try:
        return cupy.from_dlpack(array)
    except (BufferError, NotImplementedError, RuntimeError, TypeError) as error:
        raise UsageError(
            f"this {type(array).__name__} cannot be read by CuPy through DLPack ({error}); convert "
            "it to a type that CuPy has, or pass a copy in host memory"
        ) from None


class _Unsynchronized:
    """An array without its stream, for which CuPy would make the host wait."""

    def __init__(self, array: Any, interface: Mapping[str, Any]) -> None:
        self.owner = array
        self.__cuda_array_interface__ = {**interface, "stream": None}


def _through_interface(array: Any) -> Any:
    cupy = _cupy()
    interface = array.__cuda_array_interface__
    view = cupy.asarray(_Unsynchronized(array, interface))
    producer = interface.get("stream")
    if producer is not None:
        with view.device:
            event = cupy.cuda.Event(disable_timing=True)
            cupy.cuda.runtime.eventRecord(event.ptr, producer)
            cupy.cuda.get_current_stream().wait_event(event)
    return view
