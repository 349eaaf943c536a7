"""Compressed gradients and weights for FSDP2, with one additional line in the script.

::

    quantize_fsdp(model, gradient_bits=4, weight_bits=8)

Needs torch.distributed and the compiled core, but neither MPI nor ``hvd.init()``. See docs/ddp.md.
"""

import torch

from qsgd_hpc.errors import UsageError

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as _  # noqa: F401
except ImportError:
    raise UsageError(
        f"compression with FSDP2 needs PyTorch 2.9 or newer, whose collectives can be replaced; "
        f"this is {torch.__version__}. With DDP, any PyTorch from 2.4 on compresses."
    ) from None

from qsgd_hpc.torch.fsdp.quantize import QuantizedShards, quantize_fsdp

__all__ = ["QuantizedShards", "quantize_fsdp"]
