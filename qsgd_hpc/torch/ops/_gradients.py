"""Base class of differentiable collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Handle
from qsgd_hpc.runtime.process_sets import ProcessSet

__all__ = ["Collective", "run"]


class Collective(ABC):
    """One call of a collective on some tensors.

    A rank's result depends on all ranks' tensors, so the gradient of a collective is a
    collective, with its own name; docs/horovod.md has the formulae. Each tensor of a group has a
    separate gradient, because a script may differentiate the results one by one.
    """

    kind: ClassVar[str]
    """Name of the operation in the core."""
    needs_values = False
    """Whether the gradient depends on the input and the output."""

    def __init__(self, name: str | None, process_set: ProcessSet, *, grouped: bool = False) -> None:
        self._name = ops.label(self.kind, name, process_set)
        self._process_set = process_set
        self._grouped = grouped

    @abstractmethod
    def start(self, tensors: Sequence[torch.Tensor]) -> Handle:
        """Start the operation; its result is the list of new tensors."""

    @abstractmethod
    def gradient(self, index: int, gradient: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        """Return the gradient of one of the tensors, computed by differentiable operations.

        ``values`` are the input and the output, if ``needs_values``.
        """

    def gradient_name(self, index: int) -> str:
        """Return the name of the gradient of one of the tensors."""
        member = f"{self._name}.{index}" if self._grouped else self._name
        return f"{member}.gradient"


class _Member(torch.autograd.Function):
    """The autograd node between one input of a collective and its result."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Collective,
        index: int,
        made: tuple[torch.Tensor],
        tensor: torch.Tensor,
        anchor: torch.Tensor,
    ) -> torch.Tensor:
        ctx.call, ctx.index = call, index
        if call.needs_values:
            ctx.save_for_backward(tensor, made[0])
        return made[0]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        values = ctx.saved_tensors if ctx.call.needs_values else ()
        return None, None, None, ctx.call.gradient(ctx.index, gradient, *values), None


def run(call: Collective, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Execute a collective and return its results."""
    with torch.no_grad():
        outputs: list[torch.Tensor] = ops.run_now(call.start, tensors)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return outputs
    # The anchor makes every result part of the backward pass: another rank may need a gradient
    # that this rank does not need.
    anchor = torch.empty(0, requires_grad=True)
    return [
        _Member.apply(call, i, (made,), tensor, anchor)  # type: ignore[no-untyped-call]
        for i, (made, tensor) in enumerate(zip(outputs, tensors, strict=True))
    ]
