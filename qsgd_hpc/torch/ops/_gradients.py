"""Runs a collective so that a backward pass goes through it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from qsgd_hpc import ops
from qsgd_hpc.ops import Handle

__all__ = ["Collective", "run"]


class Collective(ABC):
    """One call of a collective on some tensors.

    What a rank's result depends on lies on all ranks, so the gradient of a collective is a
    collective: that of the sum of all ranks' losses. Ranks make it under one name, so it does not
    matter in which order their backward passes come to it.
    """

    needs_values = False
    """Whether the gradient depends on what went in and what came out."""

    @abstractmethod
    def start(self, tensors: Sequence[torch.Tensor]) -> Handle:
        """Start it; the result is the list of tensors that it makes."""

    @abstractmethod
    def gradients(
        self, gradients: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Return the gradients of what went in, by operations that have gradients themselves.

        ``values`` are what went in and what came out, where ``needs_values``.
        """


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Collective, *tensors: torch.Tensor) -> Any:
        outputs = ops.run_now(call.start, tensors)
        ctx.call = call
        if call.needs_values:
            ctx.save_for_backward(*tensors, *outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, *ctx.call.gradients(gradients, ctx.saved_tensors))


def run(call: Collective, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Carry out a collective and return what it makes."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return list(_Differentiable.apply(call, *tensors))  # type: ignore[no-untyped-call]
    outputs: list[torch.Tensor] = ops.run_now(call.start, tensors)
    return outputs
