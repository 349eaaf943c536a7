"""Start every rank from the same state."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from qsgd_hpc import basics
from qsgd_hpc.errors import UsageError
from qsgd_hpc.objects import allgather_object, broadcast_object
from qsgd_hpc.process_sets import ProcessSet, global_process_set
from qsgd_hpc.torch.ops import broadcast_async_

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Replace every tensor by root_rank's.

    Args:
        params: ``model.state_dict()`` or ``model.named_parameters()``.
        root_rank: the rank whose values all take; it counts all ranks of the job.
        process_set: the ranks that take part; by default all.
    Raises:
        UsageError: a single tensor, or root_rank is no rank of the set.
        HorovodInternalError: the ranks' tensors do not fit each other, or a rank died.
    """
    if isinstance(params, torch.Tensor):
        raise UsageError("broadcast_parameters takes model.state_dict() or named_parameters()")
    pairs = params.items() if isinstance(params, Mapping) else params
    handles = [
        broadcast_async_(tensor, root_rank, f"parameter.{name}", process_set)
        for name, tensor in pairs
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Replace the optimizer's state and its options (learning rate...) by root_rank's.

    Works for every optimizer of torch, before the first step too, and when only root_rank has
    restored a checkpoint: the whole state travels, so the ranks need not have equal structures
    beforehand. ``model`` is accepted for compatibility and not needed.
    """
    root = basics.rank() == root_rank
    saved = io.BytesIO()
    if root:
        torch.save(optimizer.state_dict(), saved)
    data = broadcast_object(saved.getvalue(), root_rank, "optimizer.state", process_set)
    if not root:
        # A rank may lack the device that the root keeps its state on; the optimizer moves it.
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        optimizer.load_state_dict(state)
