"""Conversion of concrete JAX arrays to the core's memory and back.

Typed random keys can be sent and stored only as the integers that they contain.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from qsgd_hpc.arrays._memory import Arrays
from qsgd_hpc.compression import FLOATING
from qsgd_hpc.runtime import gpu

__all__ = ["ARRAYS", "integers_of", "kind_of", "of_kind", "with_int64"]

Array = NDArray[Any]

_ALIGNMENT = 64  # bytes: JAX uses memory of this alignment without a copy
_PER_THREAD = 2  # CUDA's and HIP's handle of the calling thread's default stream
_INTEGERS = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_EXPORTED = _INTEGERS | FLOATING | {"bool", "complex64", "complex128"}
"""Types that all supported versions of JAX export by DLPack."""


def with_int64() -> AbstractContextManager[Any]:
    """Return a context in which JAX has 64-bit types, even if the script has not enabled them."""
    home: Any = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
    context: AbstractContextManager[Any] = home.enable_x64(True)
    return context


def kind_of(array: Any) -> Any:
    """Return the generator of an array of keys, such as ``"threefry2x32"``; else None."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_impl(array) if is_key else None


def integers_of(array: Any) -> Any:
    """Return the integers of an array of keys; other arrays unchanged."""
    return array if kind_of(array) is None else jax.random.key_data(array)


def of_kind(array: Any, kind: Any) -> Any:
    """Return an array of keys from their integers; the array itself if ``kind`` is None."""
    return array if kind is None else jax.random.wrap_key_data(array, impl=kind)


def _device_of(array: Any) -> int | None:
    """Return the device from which the core can read an array; None: it must be copied."""
    served, sharding = gpu.served(), getattr(array, "sharding", None)
    if served is None or sharding is None or str(array.dtype) not in _EXPORTED:
        return None
    if len(sharding.device_set) != 1:
        return None
    (device,) = sharding.device_set
    if device.platform == "cpu":
        return 0 if served == "cpu" else None  # the kernels' twin treats the host as a device
    number = device.local_hardware_id
    if served != "cuda" or number is None or sharding.memory_kind != "device":
        return None
    return number if gpu.serves(number) else None


class _JaxArrays(Arrays):
    """Adapter of JAX arrays.

    A readable array is the array itself if the core can read it, else a copy in host memory. The
    core writes only to new arrays, to which nothing else refers yet.
    """

    reduces_complex = True

    def readable(self, tensor: Any) -> Any:
        return super().readable(tensor) if _device_of(tensor) is None else tensor

    def shares(self, readable: Any, tensor: Any) -> bool:
        """Return True, so that the core never overwrites an array: JAX's arrays are immutable."""
        return True

    def address(self, readable: Any) -> int:
        if isinstance(readable, np.ndarray):
            return super().address(readable)
        return int(readable.unsafe_buffer_pointer())

    def device(self, readable: Any) -> tuple[int, int]:
        """Return the device, and the stream on which ``owner`` has waited for the array."""
        if isinstance(readable, np.ndarray):
            return -1, 0
        number = _device_of(readable)
        assert number is not None
        return number, 0 if gpu.served() == "cpu" else _PER_THREAD

    def owner(self, readable: Any) -> Any:
        """Return the array and its DLPack capsule, which prevents donation of the memory."""
        if isinstance(readable, np.ndarray):
            return readable
        if gpu.served() != "cpu":
            return readable, readable.__dlpack__(stream=_PER_THREAD)
        return readable.block_until_ready(), readable.__dlpack__()

    def cast(self, readable: Any, dtype: str) -> Any:
        with with_int64():
            return readable.astype(dtype)

    def new_like(self, readable: Any, rows: int | None = None) -> Any:
        """Return a JAX array, or host memory that JAX can use without a copy."""
        if not isinstance(readable, np.ndarray):
            if rows is None:
                return self.copied(readable)
            with with_int64():
                home = readable.sharding if readable.committed else None
                return jnp.empty((rows, *readable.shape[1:]), readable.dtype, device=home)
        raw = np.empty(readable.nbytes + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        memory: Array = (
            raw[start : start + readable.nbytes].view(readable.dtype).reshape(readable.shape)
        )
        return memory

    def copied(self, readable: Any) -> Any:
        if isinstance(readable, np.ndarray):
            return super().copied(readable)
        with with_int64():  # else JAX would convert a widened array back to 32 bits
            return jnp.array(readable, readable.dtype, copy=True)

    def delivered(self, result: Any, like: Any, into: Any = None) -> Any:
        """Return the values as a JAX array on the device of ``like``."""
        if not isinstance(result, np.ndarray):
            with with_int64():
                return result.astype(like.dtype)
        host = result.astype(like.dtype, copy=False)
        if not getattr(like, "committed", False):
            return jnp.asarray(host)
        same = like.shape == host.shape or len(like.sharding.device_set) == 1
        return jax.device_put(host, like.sharding) if same else jnp.asarray(host)


ARRAYS = _JaxArrays()
