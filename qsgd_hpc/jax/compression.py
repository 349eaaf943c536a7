"""``hvd.Compression``: what travels instead of a float32 array."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from qsgd_hpc._base.compressors import CastCompressor, Choices

__all__ = ["Compression", "Fp32Compressor"]


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


class Fp32Compressor(_Cast):
    """Sends floating arrays as float32: for those that the core has no arithmetic for."""

    target = jnp.float32


class Compression(Choices):
    """The choices for ``compression=``."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor
