"""``hvd.Compression``: compressors for tensors."""

from __future__ import annotations

import tensorflow as tf

from qsgd_hpc.frameworks.compressors import Choices, Compressor, NoneCompressor, casting

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

FP16Compressor, BF16Compressor = casting(
    lambda tensor: bool(tensor.dtype.is_floating),
    tf.cast,
    FP16Compressor=tf.float16,
    BF16Compressor=tf.bfloat16,
)


class Compression(Choices):
    """The choices for ``compression=``."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor
