"""``hvd.Compression``: what travels instead of a float32 array."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from qsgd_hpc._base.compressors import CastCompressor, Choices, NoneCompressor
from qsgd_hpc.compression import FLOATING, Lossy

__all__ = ["Compression", "compressor_for"]


class _Cast(CastCompressor):
    @staticmethod
    def is_floating(tensor: Any) -> bool:
        """Tell whether the array has floating elements."""
        return bool(jnp.issubdtype(tensor.dtype, jnp.floating))

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return the array in that type."""
        return tensor.astype(dtype)


class FP16Compressor(_Cast):
    """Sends floating arrays as float16."""

    target = jnp.float16


class BF16Compressor(_Cast):
    """Sends floating arrays as bfloat16."""

    target = jnp.bfloat16


class _Fp32Compressor(_Cast):
    """Sends floating arrays as float32."""

    target = jnp.float32


class Compression(Choices):
    """The choices for ``compression=``."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor


def compressor_for(dtype: Any, compression: Any) -> Any:
    """Return the pair of functions around the reduction of an array.

    Those that the core has no arithmetic for travel as float32.
    """
    if jnp.issubdtype(dtype, jnp.floating) and dtype.name not in FLOATING:
        return _Fp32Compressor
    return NoneCompressor if isinstance(compression, Lossy) else compression
