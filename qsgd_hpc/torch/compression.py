"""``hvd.Compression``: what travels instead of a float32 tensor."""

from __future__ import annotations

from typing import Any

import torch

from qsgd_hpc._base.compressors import CastCompressor, Choices, Compressor, NoneCompressor

__all__ = [
    "BF16Compressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "NoneCompressor",
]


class _Cast(CastCompressor):
    @staticmethod
    def is_floating(tensor: Any) -> bool:
        """Tell whether the tensor has floating elements."""
        return bool(tensor.is_floating_point())

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return the tensor in that type."""
        return tensor.to(dtype)


class FP16Compressor(_Cast):
    """Sends floating tensors as float16."""

    target = torch.float16


class BF16Compressor(_Cast):
    """Sends floating tensors as bfloat16."""

    target = torch.bfloat16


class Compression(Choices):
    """The choices for ``compression=``."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor
