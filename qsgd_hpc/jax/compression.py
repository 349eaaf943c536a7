"""``hvd.Compression``: compressors for arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from qsgd_hpc.compression import FLOATING
from qsgd_hpc.frameworks.compressors import Choices, casting
from qsgd_hpc.frameworks.reduction import compressor_of

__all__ = ["Compression", "compressed"]


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


def compressed(
    arrays: Sequence[Any], compression: Any
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Return the arrays to send, and a function that converts the reduced ones."""
    kinds = [_compressor_for(array.dtype, compression) for array in arrays]
    pairs = [kind.compress(jnp.asarray(array)) for kind, array in zip(kinds, arrays, strict=True)]

    def restored(reduced: Sequence[Any]) -> list[Any]:
        return [k.decompress(r, c) for k, r, (_, c) in zip(kinds, reduced, pairs, strict=True)]

    return [to_send for to_send, _ in pairs], restored


def _compressor_for(dtype: Any, compression: Any) -> Any:
    """Return the compressor of arrays of a type; none for codes, which the core applies.

    Types for which the core has no arithmetic are sent as float32.
    """
    if jnp.issubdtype(dtype, jnp.floating) and dtype.name not in FLOATING:
        return _Fp32Compressor
    return compressor_of(compression)
