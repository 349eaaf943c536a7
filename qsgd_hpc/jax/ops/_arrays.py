"""Conversion of concrete JAX arrays to the core's memory and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from qsgd_hpc.arrays._memory import Arrays

__all__ = ["ARRAYS"]

Array = NDArray[Any]

_ALIGNMENT = 64  # bytes: JAX takes over memory that is so aligned, and copies other


class _JaxArrays(Arrays):
    reduces_complex = True

    def shares(self, readable: Array, tensor: Any) -> bool:
        """Return True: the memory that JAX exposes is read-only."""
        return True

    def new_like(self, readable: Array) -> Array:
        """Return memory that JAX can take over."""
        raw = np.empty(readable.nbytes + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        memory: Array = (
            raw[start : start + readable.nbytes].view(readable.dtype).reshape(readable.shape)
        )
        return memory

    def delivered(self, result: Array, like: Any, into: Any = None) -> Any:
        """Return the values as a JAX array on the device of ``like``."""
        host = result.astype(like.dtype, copy=False)
        if not getattr(like, "committed", False):
            return jnp.asarray(host)
        same = like.shape == host.shape or len(like.sharding.device_set) == 1
        return jax.device_put(host, like.sharding) if same else jnp.asarray(host)


ARRAYS = _JaxArrays()
