"""``hvd.Compression``: compressors for tensors."""

from __future__ import annotations

import torch

from qsgd_hpc.frameworks.compressors import Choices, Compressor, NoneCompressor, casting

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

FP16Compressor, BF16Compressor = casting(
    lambda tensor: bool(tensor.is_floating_point()),
    lambda tensor, dtype: tensor.to(dtype),
    FP16Compressor=torch.float16,
    BF16Compressor=torch.bfloat16,
)


class Compression(Choices):
    """The choices for ``compression=``."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor
