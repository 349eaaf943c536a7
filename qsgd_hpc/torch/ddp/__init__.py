"""Compressed gradients for DistributedDataParallel, with two additional lines in a DDP script.

::

    state = QSGDState(bits=4)
    model.register_comm_hook(state, qsgd_hook)

Needs torch.distributed and the compiled core, but neither MPI nor ``hvd.init()``. See docs/ddp.md.
"""

# Annotations must not become strings here: torch compares them with its own classes.

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from qsgd_hpc.errors import UsageError
from qsgd_hpc.rules import PLAIN_BITS
from qsgd_hpc.torch.ddp.state import QSGDState

__all__ = ["QSGDState", "compress", "qsgd_hook"]


def qsgd_hook(
    state: QSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks with its large gradients compressed.

    Sparse and complex gradients are sent uncompressed, through torch's own hook.

    Args:
        state: the state of this model; each model needs its own.
        bucket: the bucket from DDP, of any floating-point type.
    Returns:
        a future of the bucket's buffer, the same bits on every rank. NaN or Inf in a gradient on
        any rank gives values that are not finite on every rank.
    """
    if not isinstance(state, QSGDState):
        raise UsageError(
            f"qsgd_hook got {type(state).__name__} as its state: write "
            "model.register_comm_hook(QSGDState(bits=4), qsgd_hook), or compress(model, bits=4)"
        )
    if bucket.buffer().is_complex():
        raise UsageError(
            f"DDP of PyTorch {torch.__version__} averages complex gradients wrongly with any hook: "
            "install a newer PyTorch, or leave the hook out"
        )
    # The buffer of complex gradients, which all have one type, is of pairs of floats.
    if bucket.buffer().is_sparse or bucket.parameters()[0].is_complex():
        state.leave(bucket)
        group: Any = state.process_group
        return allreduce_hook(group, bucket)
    return state.reduce(bucket)


def compress(model: DistributedDataParallel, bits: int | None = None, **settings: Any) -> QSGDState:
    """Register the hook with the model's process group and the names of its parameters.

    Args:
        settings: arguments of :class:`QSGDState`.
    Returns:
        the state, for checkpoints.
    Raises:
        UsageError: the model is not wrapped in DDP, a setting is invalid, or the process group
            cannot send the codes.
    """
    if not isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):
        raise UsageError(
            f"compress() got {type(model).__name__}: pass the model that DistributedDataParallel "
            "returns. For fully_shard, use qsgd_hpc.torch.fsdp.quantize_fsdp; "
            "FullyShardedDataParallel is not supported"
        )
    if bits == PLAIN_BITS:
        raise UsageError("compress(bits=32): choose 1 to 8; without compress(), DDP sends float32")
    state = QSGDState(
        model.process_group, bits, named_parameters=model.module.named_parameters(), **settings
    )
    state.belongs_to(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            state.require_transport(parameter)
            break
    model.register_comm_hook(state, qsgd_hook)
    return state
