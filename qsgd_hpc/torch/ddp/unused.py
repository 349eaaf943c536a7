"""Means that DDP discards: those of parameters without a gradient on any rank in a step.

With ``find_unused_parameters``, DDP averages zeros for such a parameter and leaves its ``grad`` as
it is. Coding adds the residuals to these zeros, so the mean is what the ranks still owed, and
without a correction it would be lost.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from qsgd_hpc.torch.ddp.memory import Memory, Slot

__all__ = ["Unused"]

_Sent = tuple[torch.Tensor, int, Slot, torch.Tensor, int]


class Unused:
    """Returns discarded means to the residuals of the elements' owners."""

    def __init__(self) -> None:
        self._sent: list[_Sent] = []

    def watch(self, bucket: Any, flat: torch.Tensor | None, memory: Memory) -> None:
        """Remember the gradients of a bucket until its backward pass ends."""
        if torch._C._current_graph_task_id() == -1:  # Join sends zeros for a rank that has ended
            return
        if bucket.index() == 0:
            self._sent = []  # of a pass that failed
        if flat is not None:
            at = 0
            for parameter in bucket.parameters():
                slot = memory.slot(parameter)
                if slot.owner_residual is not None:
                    self._sent.append((parameter, _version(parameter), slot, flat, at))
                at += parameter.numel()
        if bucket.is_last():
            sent, self._sent = self._sent, []
            # DDP's own callback, which writes the gradients, is queued after this hook.
            last = functools.partial(_after_callbacks, functools.partial(_keep_discarded, sent))
            _after_callbacks(last)


def _after_callbacks(act: Any) -> None:
    """Call ``act`` after the callbacks that the running backward pass has queued."""
    torch.autograd.Variable._execution_engine.queue_callback(act)  # type: ignore[attr-defined]


def _keep_discarded(sent: list[_Sent]) -> None:
    for parameter, version, slot, flat, at in sent:
        # Equal versions: nothing was written to the gradient, unless it is a view of the bucket.
        if version != _version(parameter) or _is_view_of(parameter.grad, flat):
            continue
        begin, end = slot.owned
        assert slot.owner_residual is not None
        slot.owner_residual += flat[at + begin : at + end].to(slot.owner_residual.device)


def _version(parameter: torch.Tensor) -> int:
    """Return the number of changes of the gradient; -1 if there is none."""
    return -1 if parameter.grad is None else parameter.grad._version


def _is_view_of(gradient: torch.Tensor | None, flat: torch.Tensor) -> bool:
    return gradient is not None and (
        gradient.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    )
