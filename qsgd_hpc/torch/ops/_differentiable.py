"""The collectives as torch can execute and differentiate them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.eager import (
    start_allgathers,
    start_allreduces,
    start_alltoall,
    start_broadcast,
    start_reducescatters,
)
from qsgd_hpc.frameworks.reduction import CURVED, Reduction, require_values
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.ops import Adasum, Average, Handle, Op, Product, Sum
from qsgd_hpc.runtime.process_sets import ProcessSet
from qsgd_hpc.torch.ops._tensors import TENSORS

__all__ = [
    "Allgather", "Allreduce", "Alltoall", "Broadcast", "Collective", "Reducescatter", "Splits",
    "Tensors", "run", "run_scaled",
]  # fmt: skip

Tensors = Sequence[torch.Tensor]
Splits = Sequence[int] | torch.Tensor | None


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
    def start(self, tensors: Tensors) -> Handle:
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


def run(call: Collective, tensors: Tensors) -> list[torch.Tensor]:
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


class Alltoall(Collective):
    """An alltoall that sends ``splits[i]`` rows to the i-th rank of the process set."""

    kind = "alltoall"

    def __init__(self, splits: Splits, name: str | None, process_set: ProcessSet) -> None:
        super().__init__(name, process_set)
        self._splits = splits.tolist() if isinstance(splits, torch.Tensor) else splits
        self.received: list[int] = []
        """Number of rows received from each rank, once it is done."""

    def start(self, tensors: Tensors) -> Handle:
        """Start exchanging the rows of one tensor."""
        (tensor,) = tensors
        handle = start_alltoall(TENSORS, tensor, self._splits, self._name, self._process_set)
        return handle.then(self._without_rows)

    def _without_rows(self, made: tuple[torch.Tensor, list[int]]) -> list[torch.Tensor]:
        exchanged, self.received = made
        return [exchanged]

    def gradient(self, index: int, gradient: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        """Send the gradient back to the ranks of the rows."""
        back = Alltoall(self.received, self.gradient_name(index), self._process_set)
        return run(back, [gradient])[0]


class Allgather(Collective):
    """An allgather of tensors; only their numbers of rows may differ between ranks.

    Args:
        op: the reduction of the ranks' gradients: Average, as scripts of this API expect, or
            Sum, if it is part of the derivative of another operation.
    """

    kind = "allgather"

    def __init__(
        self, name: str | None, process_set: ProcessSet, *, grouped: bool = False, op: Op = Average
    ) -> None:
        super().__init__(name, process_set, grouped=grouped)
        self._op = op
        self._rows: list[list[int]] = []

    def start(self, tensors: Tensors) -> Handle:
        """Start gathering into new tensors."""
        handle = start_allgathers(
            TENSORS, tensors, self._name, self._process_set, grouped=self._grouped
        )
        return handle.then(self._without_rows)

    def _without_rows(self, made: list[tuple[torch.Tensor, list[int]]]) -> list[torch.Tensor]:
        self._rows = [rows for _, rows in made]
        return [gathered for gathered, _ in made]

    def gradient(self, index: int, gradient: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        """Return the mean, or sum, over the ranks of the gradients of this rank's rows."""
        rows = self._rows[index]
        mine = ops.position_in(self._process_set)
        call = Alltoall(rows, self.gradient_name(index), self._process_set)
        parts = run(call, [gradient])[0].reshape(len(rows), rows[mine], *gradient.shape[1:])
        return parts.mean(0) if self._op is Average else parts.sum(0)


class _Reducing(Collective):
    """A collective that reduces tensors."""

    def __init__(self, reduction: Reduction, name: str | None, *, grouped: bool = False) -> None:
        super().__init__(name, reduction.process_set, grouped=grouped)
        self._reduction = reduction
        self.needs_values = reduction.op in CURVED


class Allreduce(_Reducing):
    """An allreduce of tensors over the ranks of a process set."""

    kind = "allreduce"

    def start(self, tensors: Tensors) -> Handle:
        """Start reducing into new tensors."""
        return start_allreduces(
            TENSORS, tensors, self._reduction, self._name, grouped=self._grouped
        )

    def gradient(self, index: int, gradient: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        """Reduce the gradient like the tensor; sum it for nonlinear operations."""
        reduction, name = self._reduction, self.gradient_name(index)
        if reduction.op is Adasum:
            raise UsageError("Adasum has no gradient; pass tensor.detach(), or reduce by a sum")
        if reduction.op not in CURVED:
            return run(Allreduce(reduction, name), [gradient])[0]
        (total,) = run(Allreduce(replace(reduction, op=Sum), name), [gradient])
        before, after = values
        return total * _derivative(reduction.op, before, after, name, self._process_set)


def _derivative(
    op: Op, before: torch.Tensor, after: torch.Tensor, name: str, process_set: ProcessSet
) -> torch.Tensor:
    """Return the derivative of a nonlinear operation's result by this rank's tensor.

    Ranks with equal extrema share the derivative, as in ``torch.amax``.
    """
    if op is Product:
        mine = ops.position_in(process_set)
        gather = Allgather(f"{name}.factors", process_set, op=Sum)
        (everyone,) = run(gather, [before.unsqueeze(0)])
        return torch.cat([everyone[:mine], everyone[mine + 1 :]]).prod(0)
    with torch.no_grad():
        holds = (before == after).to(before.dtype)
        count = Allreduce(Reduction(Sum, process_set=process_set), f"{name}.ties")
        return holds / run(count, [holds])[0]


class Reducescatter(_Reducing):
    """A reduction of tensors of which each rank gets its part of the rows."""

    kind = "reducescatter"

    def __init__(self, reduction: Reduction, name: str | None, *, grouped: bool = False) -> None:
        require_values(reduction)
        super().__init__(reduction, name, grouped=grouped)

    def start(self, tensors: Tensors) -> Handle:
        """Start reducing into new tensors."""
        return start_reducescatters(
            TENSORS, tensors, self._reduction, self._name, grouped=self._grouped
        )

    def gradient(self, index: int, gradient: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        """Return all ranks' parts of the gradient, times a nonlinear operation's derivative."""
        reduction, name, sets = self._reduction, self.gradient_name(index), self._process_set
        if reduction.op in CURVED:
            before, share = values
            (total,) = run(Allgather(name, sets, op=Sum), [gradient])
            (after,) = run(Allgather(f"{name}.results", sets, op=Sum), [share])
            return total * _derivative(reduction.op, before, after, name, sets)
        (total,) = run(Allgather(name, sets), [gradient])
        ranks = len(ops.ranks_of(sets)) if reduction.op is Sum else 1
        return total * (reduction.prescale * reduction.postscale * ranks)


class Broadcast(Collective):
    """A broadcast of one rank's tensor to all ranks of the process set."""

    kind = "broadcast"

    def __init__(self, root_rank: int, name: str | None, process_set: ProcessSet) -> None:
        super().__init__(name, process_set)
        self._root = root_rank

    def start(self, tensors: Tensors) -> Handle:
        """Start replacing a copy of one tensor."""
        (tensor,) = tensors
        handle = start_broadcast(TENSORS, tensor, self._root, self._name, self._process_set)
        return handle.then(lambda received: [received])

    def gradient(self, index: int, gradient: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        """Return the mean of all ranks' gradients on the root, else 0."""
        reduction = Reduction(Average, process_set=self._process_set)
        average = Allreduce(reduction, self.gradient_name(index))
        (mean,) = run(average, [gradient])
        if basics.rank() == self._root:
            return mean
        # Zeros that depend on the mean, so that a second derivative is collective as on the root.
        return mean.masked_fill(torch.ones_like(mean, dtype=torch.bool), 0)


def run_scaled(
    kind: type[_Reducing],
    reduction: Reduction,
    name: str | None,
    tensors: Tensors,
    *,
    grouped: bool = False,
) -> list[torch.Tensor]:
    """Execute a reduction of this kind; its gradients include the factors.

    If the derivative depends on the values, torch multiplies by the factors, so that it
    differentiates them, too; otherwise the core does.
    """
    curved = reduction.op in CURVED and torch.is_grad_enabled()
    if not curved or not any(t.requires_grad for t in tensors):
        return run(kind(reduction, name, grouped=grouped), tensors)
    plain = replace(reduction, prescale=1.0, postscale=1.0)
    made = run(kind(plain, name, grouped=grouped), [t * reduction.prescale for t in tensors])
    factor = reduction.postscale
    return made if factor == 1 else [tensor * factor for tensor in made]
