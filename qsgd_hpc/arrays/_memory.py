"""Conversion of any array to the core's memory and back, on a GPU through CuPy; its compressors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsgd_hpc import _core
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.adapter import Adapter
from qsgd_hpc.frameworks.compressors import Choices, casting
from qsgd_hpc.runtime import gpu, ops

__all__ = ["ARRAYS", "Arrays", "Compression", "adapter_of", "view_of", "writable_view_of"]

Array = NDArray[Any]

_DLPACK_CPU = 1
_DLPACK_GPUS = frozenset({2, 10, 13})  # CUDA, ROCm, and CUDA managed memory


def view_of(array: Any) -> Any:
    """Return a numpy view of an array's memory, or of a copy if it is not exposed.

    Args:
        array: a numpy array, an object with DLPack, the buffer protocol or ``__array__``;
            a number, or a list of numbers. For an array on a GPU, the view is a CuPy array.
    Raises:
        UsageError: it contains Python objects, has a mask, or is on an unsupported device.
    """
    if is_on_gpu(array):
        return view_on_gpu(array)
    view = _shared(array)
    if view is None:
        view = np.asarray(array)
    if view.dtype.hasobject:
        raise UsageError(
            f"an array of {view.dtype} contains Python objects, whose addresses are not valid "
            "on other ranks; use allgather_object or broadcast_object"
        )
    return view


def writable_view_of(array: Any, operation: str) -> Any:
    """Return a view of an array that will be replaced; see :func:`view_of`.

    Raises:
        UsageError: it is not writable.
    """
    if not is_on_gpu(array):
        view = _shared(array)
        if view is not None and view.flags.writeable:
            return view
        what = "does not expose its memory" if view is None else "is read-only"
    elif is_immutable(array):
        what = "is read-only"
    else:
        return view_on_gpu(array)
    raise UsageError(
        f"{operation} replaces its argument, but this {type(array).__name__} {what}; use "
        f"{operation.rstrip('_')}, which returns a new array"
    )


def _shared(array: Any) -> Array | None:
    """Return a view of the array's memory, or None if it is not exposed."""
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError(
            "this MaskedArray would be sent without its mask; pass x.filled(0), and "
            "~numpy.ma.getmaskarray(x) to count the values"
        )
    if isinstance(array, np.ndarray):
        return np.asarray(array)
    if isinstance(array, (np.datetime64, np.timedelta64)):  # their buffers are bytes
        return None
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
            return None  # for example bfloat16, which numpy's DLPack does not support
        raise UsageError(
            f"this {type(array).__name__} cannot be read through DLPack ({error}); pass a copy "
            "in host memory, of a type that numpy supports"
        ) from None


def _on_host(array: Any) -> bool:
    return int(array.__dlpack_device__()[0]) == _DLPACK_CPU


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
        view = _cupy_through_dlpack(array)
    else:
        view = _cupy_through_interface(array)
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


def _cupy_through_dlpack(array: Any) -> Any:
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


def _cupy_through_interface(array: Any) -> Any:
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


def on_device_of(array: Any) -> AbstractContextManager[Any]:
    """Return a context in which new CuPy arrays are on the device of this array."""
    return nullcontext() if _is_numpy(array) else array.device


def _is_numpy(array: Any) -> bool:
    return isinstance(array, np.ndarray)


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Return whether codes and casts apply to a type."""
    return dtype.kind == "f" or str(dtype) == "bfloat16"


@functools.cache  # numpy makes the name in 16 us, a fifth of the time of a small allreduce
def _name_of(dtype: np.dtype[Any]) -> str:
    return str(dtype.newbyteorder("="))


class Arrays(Adapter):
    """Adapter of numpy arrays."""

    word = "array"
    conversion = "astype()"

    def readable(self, tensor: Array) -> Array:
        # In native byte order: the core does not know another, and ranks may have different ones.
        contiguous = np.asarray(tensor, tensor.dtype.newbyteorder("="), order="C")
        return contiguous if contiguous.flags.aligned else contiguous.copy()

    def shares(self, readable: Array, tensor: Array) -> bool:
        return np.may_share_memory(readable, tensor)

    def dtype(self, tensor: Array) -> str:
        return _name_of(tensor.dtype)

    def itemsize(self, readable: Array) -> int:
        return readable.dtype.itemsize

    def address(self, readable: Array) -> int:
        return _core.address_of(readable)

    def device(self, readable: Array) -> tuple[int, int]:
        """Return the host, or device 0 for the kernels' twin, which treats the host as a device."""
        return (0 if gpu.served() == "cpu" else -1), 0

    def cast(self, readable: Array, dtype: str) -> Array:
        return readable.astype(dtype)

    def new_like(self, readable: Array, rows: int | None = None) -> Array:
        shape = readable.shape if rows is None else (rows, *readable.shape[1:])
        return np.empty_like(readable, shape=shape)  # calls CuPy's function for its arrays

    def copied(self, readable: Array) -> Array:
        copy = self.new_like(readable)
        copy[...] = readable
        return copy

    def from_core(self, received: ops.Received, like: Array) -> Array:
        made: Array = received.data.view(like.dtype)
        return made.reshape(received.shape[0], *like.shape[1:])

    def delivered(self, result: Any, like: Array, into: Array | None = None) -> Array:
        if into is None:
            return np.asarray(result).astype(like.dtype, copy=False)
        if result is not into:
            into[...] = result
        return into


ARRAYS = Arrays()


class CallArrays(Arrays):
    """Adapter of the arrays of one call: numpy's, and CuPy's on their devices."""

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}
        """CuPy's current streams when the operation was started, by device."""

    def readable(self, tensor: Any) -> Any:
        if _is_numpy(tensor):
            return super().readable(tensor)
        with tensor.device:
            return tensor.copy() if not tensor.flags.c_contiguous else tensor

    def shares(self, readable: Any, tensor: Any) -> bool:
        if _is_numpy(readable) or _is_numpy(tensor):
            return _is_numpy(readable) and _is_numpy(tensor) and super().shares(readable, tensor)
        return bool(readable.data.ptr == tensor.data.ptr)

    def address(self, readable: Any) -> int:
        return super().address(readable) if _is_numpy(readable) else int(readable.data.ptr)

    def device(self, readable: Any) -> tuple[int, int]:
        """Return the device, and CuPy's current stream there."""
        if _is_numpy(readable):
            return super().device(readable)
        number, stream = int(readable.device.id), current_stream(readable)
        self._streams[number] = stream
        return number, int(stream.ptr)

    def cast(self, readable: Any, dtype: str) -> Any:
        with on_device_of(readable):
            return super().cast(readable, dtype)

    def new_like(self, readable: Any, rows: int | None = None) -> Any:
        with on_device_of(readable):
            return super().new_like(readable, rows)

    def copied(self, readable: Any) -> Any:
        with on_device_of(readable):
            return super().copied(readable)

    def delivered(self, result: Any, like: Any, into: Any = None) -> Any:
        if _is_numpy(like):
            return super().delivered(result, like, into)
        with like.device:
            if into is None:
                into = _cupy().asarray(result).astype(like.dtype, copy=False)
            elif result is not into:
                into[...] = _cupy().asarray(result)
        self._free_later(like)
        return into

    def _free_later(self, array: Any) -> None:
        """Make the stream of this call's arrays wait for the current stream, which reads them."""
        first, now = self._streams.get(int(array.device.id)), current_stream(array)
        if first is not None and first != now:
            with array.device:
                first.wait_event(now.record())


def adapter_of(views: Sequence[Any]) -> Arrays:
    """Return the adapter for the arrays of one call, given their views."""
    return ARRAYS if all(map(_is_numpy, views)) else CallArrays()


def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError:
        raise UsageError(
            "numpy alone has no bfloat16: pip install ml_dtypes, or choose Compression.fp16"
        ) from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _cast(array: Any, dtype: Any) -> Any:
    # bfloat16 is looked up only on use, because ml_dtypes may not be installed.
    chosen = dtype() if callable(dtype) else dtype
    if callable(dtype) and not isinstance(array, np.ndarray):
        raise UsageError("CuPy has no bfloat16: choose Compression.fp16")
    with on_device_of(array):
        return array.astype(chosen, copy=False)


FP16Compressor, BF16Compressor = casting(
    lambda array: is_floating(array.dtype),
    _cast,
    FP16Compressor=np.dtype(np.float16),
    BF16Compressor=_bfloat16,
)


class Compression(Choices):
    """The choices for ``compression=``."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor
