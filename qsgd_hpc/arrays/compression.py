"""``hvd.Compression`` for plain arrays: what travels instead of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from qsgd_hpc._base.compressors import CastCompressor, Choices
from qsgd_hpc.arrays._memory import is_floating
from qsgd_hpc.errors import UsageError

__all__ = ["Compression"]


def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError:
        raise UsageError(
            "numpy has no bfloat16 by itself: pip install ml_dtypes, or choose Compression.fp16"
        ) from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


class _Cast(CastCompressor):
    @staticmethod
    def is_floating(tensor: Any) -> bool:
        """Tell whether the array has floating elements."""
        return is_floating(tensor.dtype)

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return the array in that type."""
        return tensor.astype(dtype, copy=False)


class FP16Compressor(_Cast):
    """Sends floating arrays as float16."""

    target = np.dtype(np.float16)


class BF16Compressor(_Cast):
    """Sends floating arrays as bfloat16."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the array in bfloat16, if it is floating."""
        cls.target = _bfloat16()  # not before it is asked for: it may not be installed
        return super().compress(tensor)


class Compression(Choices):
    """The choices for ``compression=``."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor
