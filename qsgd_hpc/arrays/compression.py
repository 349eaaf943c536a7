"""``hvd.Compression`` for plain arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from qsgd_hpc.arrays._memory import is_floating, on_device_of
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.compressors import Choices, casting

__all__ = ["Compression"]


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
