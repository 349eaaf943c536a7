"""Start every rank from the same state."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import basics, feedback
from qsgd_hpc.runtime.objects import allgather_object, broadcast_object
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.torch.ops import broadcast_async_
from qsgd_hpc.torch.parameters import parameters_of

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "error_feedback_state",
    "load_error_feedback_state",
]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Replace every tensor by root_rank's.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
        root_rank: the rank of the job whose values are copied.
        process_set: the participating ranks; default: all.
    Raises:
        UsageError: no such collection, or root_rank is not in the set.
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    alone = isinstance(params, torch.Tensor | torch.nn.Module | str)
    if alone or not isinstance(params, Iterable):
        raise UsageError(
            "broadcast_parameters takes model.state_dict() or named_parameters(), not a "
            f"{type(params).__name__}"
        )
    listed: Iterable[Any] = params.items() if isinstance(params, Mapping) else params
    pairs: Iterable[tuple[Any, Any]] = (
        (i, each) if isinstance(each, torch.Tensor) else each for i, each in enumerate(listed)
    )
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

    Works for every optimizer of torch, also before the first step, and if only root_rank has
    restored a checkpoint: the complete state is sent, so the ranks need not have equal structures
    beforehand. Before the first step, missing gradients are set to zero, as in Horovod. ``model``
    is accepted for compatibility and not needed.
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
    if not _has_stepped(optimizer):
        _fill_gradients(optimizer)


def error_feedback_state() -> dict[str, torch.Tensor]:
    """Return the residuals of error feedback; every rank must call it, between two steps.

    Save it in a checkpoint, so that a training on any number of ranks resumes without loss.

    Returns:
        by tensor name, float32 on the CPU of shape (elements,): the accumulated error of all
        reductions so far, in units of a result. The same on every rank. Tensors, because
        ``torch.load`` accepts these by default.
    Raises:
        UsageError: reductions are in flight.
    """
    state = feedback.error_feedback_state()
    return {name: torch.from_numpy(values) for name, values in state.items()}


def load_error_feedback_state(state: Mapping[str, Any]) -> None:
    """Replace the residuals by a saved state, the same on every rank.

    Args:
        state: what ``error_feedback_state`` returned, on any number of ranks; tensors or arrays.
    """
    arrays: dict[str, Any] = {
        # A checkpoint may have been loaded to a GPU.
        name: values.cpu().numpy() if isinstance(values, torch.Tensor) else values
        for name, values in state.items()
    }
    feedback.load_error_feedback_state(arrays)


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer has made a step; Adagrad has state before its first."""
    states = optimizer.state_dict()["state"].values()
    return any(float(state.get("step", 1)) > 0 for state in states)


def _fill_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set missing gradients of parameters that require one to zeros."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return  # it accepts only sparse gradients, and zeros would make the next one dense
    for parameter in parameters_of(optimizer):
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
