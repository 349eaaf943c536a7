"""The way of a concrete JAX array to the core and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from qsgd_hpc import ops
from qsgd_hpc.errors import UsageError

Array = NDArray[Any]

__all__ = ["buffer_of", "moved_buffer_of", "new_like", "on_host", "placed_like", "received_array"]

_SAME_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_KNOWN = {
    "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
}  # fmt: skip
_ALIGNMENT = 64  # bytes: JAX takes over memory that is so aligned, and copies other


def on_host(array: jax.Array) -> Array:
    """Return the values where the core can read them; those of a CPU array are not copied."""
    return np.asarray(array, order="C")


def new_like(host: Array) -> Array:
    """Return memory for a result that JAX can take over."""
    raw = np.empty(host.nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    memory: Array = raw[start : start + host.nbytes].view(host.dtype).reshape(host.shape)
    return memory


def _pointer(host: Array) -> int:
    return host.ctypes.data


def buffer_of(host: Array) -> ops.Buffer:
    """Describe to the core what it is to compute with.

    Raises:
        UsageError: it has no arithmetic for this type.
    """
    name = host.dtype.name
    if host.dtype.kind == "c":
        part = f"float{4 * host.dtype.itemsize}"
        return ops.Buffer(_pointer(host), (*host.shape, 2), part, host)
    if name == "bool":
        name = "uint8"
    if name not in _KNOWN:
        raise UsageError(
            f"elements of type {name} cannot be reduced; convert the array with astype()"
        )
    return ops.Buffer(_pointer(host), host.shape, name, host)


def moved_buffer_of(host: Array) -> ops.Buffer:
    """Describe to the core what it moves without computing: any type will do."""
    if host.dtype.kind == "c":
        return buffer_of(host)
    name, size = host.dtype.name, host.dtype.itemsize
    moved = name if name in _KNOWN else _SAME_SIZE[size]
    return ops.Buffer(_pointer(host), host.shape, moved, host)


def received_array(received: ops.Received, like: Array) -> Array:
    """Return what the core has made, of the type of ``like``; it keeps the memory."""
    made: Array = received.data.view(like.dtype).reshape(received.shape[0], *like.shape[1:])
    return made


def placed_like(host: Array, array: jax.Array) -> jax.Array:
    """Return the values as a JAX array where ``array`` is."""
    if not getattr(array, "committed", False):
        return jnp.asarray(host)
    same = array.shape == host.shape or len(array.sharding.device_set) == 1
    return jax.device_put(host, array.sharding) if same else jnp.asarray(host)
