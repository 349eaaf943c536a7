"""``hvd.Compression``: compressors for arrays."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from qsgd_hpc.compression import FLOATING, Lossy
from qsgd_hpc.frameworks.compressors import Choices, NoneCompressor, casting

__all__ = ["Compression", "compressor_for"]


FP16Compressor, BF16Compressor, _Fp32Compressor = casting(
    lambda tensor: bool(jnp.issubdtype(tensor.dtype, jnp.floating)),
    lambda tensor, dtype: tensor.astype(dtype),
    FP16Compressor=jnp.float16,
    BF16Compressor=jnp.bfloat16,
    Fp32Compressor=jnp.float32,
)


class Compression(Choices):
    """The choices for ``compression=``."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor


def compressor_for(dtype: Any, compression: Any) -> Any:
    """Return the compressor of arrays of a type; none for codes, which the core applies.

    Types for which the core has no arithmetic are sent as float32.
    """
    if jnp.issubdtype(dtype, jnp.floating) and dtype.name not in FLOATING:
        return _Fp32Compressor
    return NoneCompressor if isinstance(compression, Lossy) else compression
