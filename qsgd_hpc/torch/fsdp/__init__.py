"""Compressed gradients and weights for FSDP2, with one additional line in the script.

::

    quantize_fsdp(model, gradient_bits=4, weight_bits=8)

Needs torch.distributed and the compiled core, but neither MPI nor ``hvd.init()``. See docs/ddp.md.
"""

from qsgd_hpc.torch.fsdp.quantize import QuantizedShards, quantize_fsdp

__all__ = ["QuantizedShards", "quantize_fsdp"]
