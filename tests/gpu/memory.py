"""Where the kernels see a test's arrays: where they are, or in copies on a device."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

GUARD = 64  # bytes on both sides of a copy, which nothing may write
MARK = 0xA5


class Memory(Protocol):
    """Contiguous arrays, as an address and until the call that took it has ended."""

    def address(self, array: NDArray[Any]) -> int:
        """Return where the kernels find the array."""

    def fetch(self) -> None:
        """Wait for the kernels, and bring back what they have written."""


class HostMemory:
    """For kernels that run on the CPU."""

    def __init__(self) -> None:
        self._kept: list[NDArray[Any]] = []

    def address(self, array: NDArray[Any]) -> int:
        self._kept.append(array)
        return int(array.ctypes.data)

    def fetch(self) -> None:
        self._kept.clear()


class DeviceMemory:
    """Copies that are as much out of line as the arrays are."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._kept: list[tuple[NDArray[Any], Any, int]] = []

    def address(self, array: NDArray[Any]) -> int:
        begin = GUARD + array.ctypes.data % 16
        copy = self._torch.full((begin + array.nbytes + GUARD,), MARK, dtype=self._torch.uint8)
        copy[begin : begin + array.nbytes] = self._torch.from_numpy(_bytes(array).copy())
        device = copy.to("cuda")
        self._kept.append((array, device, begin))
        return int(device.data_ptr()) + begin

    def fetch(self) -> None:
        self._torch.cuda.synchronize()
        for array, device, begin in self._kept:
            now = device.cpu().numpy()
            end = begin + array.nbytes
            assert (now[:begin] == MARK).all(), "written before the beginning"
            assert (now[end:] == MARK).all(), "written behind the end"
            if array.flags.writeable:
                _bytes(array)[:] = now[begin:end]
        self._kept.clear()


@functools.cache
def _has_gpu() -> bool:
    """Tell whether the kernels of this installation work on a GPU here; imports no framework."""
    from qsgd_hpc import _core
    from qsgd_hpc.runtime import gpu

    library = gpu.library()
    return gpu.served() == "cuda" and library is not None and not _core.gpu_fault(library, 0)


@functools.cache
def has_cupy() -> bool:
    """Tell whether there is a GPU that CuPy can use, and kernels for it."""
    if find_spec("cupy") is None or not _has_gpu():
        return False
    import cupy

    return bool(cupy.cuda.is_available())


@functools.cache
def has_jax() -> bool:
    """Tell the same of JAX."""
    if find_spec("jax") is None or not _has_gpu():
        return False
    # Other processes of the tests use the same GPU, of which JAX would take most.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return bool(jax.default_backend() == "gpu")


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8)


@functools.cache
def has_device() -> bool:
    """Tell whether there is a GPU that torch can use, and kernels for it."""
    from qsgd_hpc.runtime import gpu

    library = gpu.library()
    if find_spec("torch") is None or library is None or gpu.device_type(library) != "cuda":
        return False
    import torch

    return bool(torch.cuda.is_available())
