"""``hvd.Compression``: what travels instead of a float32 tensor."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from qsgd_hpc.compression import Qsgd

__all__ = ["Compression", "Compressor"]


class Compressor(Protocol):
    """A pair of functions around the allreduce; scripts may bring their own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is reduced, and what ``decompress`` needs to know."""

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return the reduced tensor in its original type."""


class NoneCompressor:
    """Sends a tensor as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return the tensor."""
        return tensor


class _Cast:
    target: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor in 16 bits, if it is floating."""
        return (tensor.to(cls.target) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return the tensor in the type that it had."""
        return tensor.to(context)


class Fp16Compressor(_Cast):
    """Sends floating tensors as float16."""

    target = torch.float16


class Bf16Compressor(_Cast):
    """Sends floating tensors as bfloat16."""

    target = torch.bfloat16


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = Fp16Compressor
    bf16 = Bf16Compressor
    qsgd = Qsgd
    """``Compression.qsgd(bits=4, bucket_size=512, norm="max")``; see :class:`Qsgd`."""
