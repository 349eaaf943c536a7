"""Start every rank from the same state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from qsgd_hpc import basics, ops
from qsgd_hpc.errors import UsageError
from qsgd_hpc.torch.ops import broadcast_async_

__all__ = ["broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Return root_rank's object on every rank; it must be picklable."""
    return ops.broadcast_object(obj, root_rank, name)


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]], root_rank: int = 0
) -> None:
    """Replace every tensor by root_rank's.

    Args:
        params: ``model.state_dict()`` or ``model.named_parameters()``.
        root_rank: the rank whose values all take.
    """
    if isinstance(params, torch.Tensor):
        raise UsageError("broadcast_parameters takes model.state_dict() or named_parameters()")
    pairs = params.items() if isinstance(params, Mapping) else params
    handles = [
        broadcast_async_(tensor, root_rank, name=f"parameter.{name}")
        for name, tensor in pairs
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Replace the optimizer's state and its options (learning rate...) by root_rank's.

    Works before the first step, too, and when only root_rank has restored a checkpoint: the whole
    state travels, so the ranks need not have equal structures beforehand. ``model`` is accepted
    for compatibility and not needed.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS keeps state that cannot be broadcast; use another optimizer")
    root = basics.rank() == root_rank
    state = broadcast_object(optimizer.state_dict() if root else None, root_rank, "optimizer.state")
    if not root:
        optimizer.load_state_dict(state)
