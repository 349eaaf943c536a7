"""Allreduce as a differentiable collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.eager import start_allreduces
from qsgd_hpc.frameworks.reduction import CURVED, Reduction
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Adasum, Handle, Op, Product, Sum
from qsgd_hpc.runtime.process_sets import ProcessSet
from qsgd_hpc.torch.ops._gradients import Collective, run
from qsgd_hpc.torch.ops._moves import Allgather
from qsgd_hpc.torch.ops._tensors import TENSORS

__all__ = ["Allreduce", "Reducing", "derivative", "run_scaled"]

Tensors = Sequence[torch.Tensor]


class Reducing(Collective):
    """A collective that reduces tensors."""

    def __init__(self, reduction: Reduction, name: str | None, *, grouped: bool) -> None:
        super().__init__(name, reduction.process_set, grouped=grouped)
        self._reduction = reduction
        self.needs_values = reduction.op in CURVED


class Allreduce(Reducing):
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
            return run(Allreduce(reduction, name, grouped=False), [gradient])[0]
        (total,) = run(Allreduce(replace(reduction, op=Sum), name, grouped=False), [gradient])
        before, after = values
        return total * derivative(reduction.op, before, after, name, self._process_set)


def derivative(
    op: Op, before: torch.Tensor, after: torch.Tensor, name: str, process_set: ProcessSet
) -> torch.Tensor:
    """Return the derivative of a nonlinear operation's result by this rank's tensor.

    Ranks with equal extrema share the derivative, as in ``torch.amax``.
    """
    if op is Product:
        mine = ops.position_in(process_set)
        gather = Allgather(f"{name}.factors", process_set, grouped=False, op=Sum)
        (everyone,) = run(gather, [before.unsqueeze(0)])
        return torch.cat([everyone[:mine], everyone[mine + 1 :]]).prod(0)
    with torch.no_grad():
        holds = (before == after).to(before.dtype)
        count = Allreduce(Reduction(Sum, process_set=process_set), f"{name}.ties", grouped=False)
        return holds / run(count, [holds])[0]


def _separate_factors(reduction: Reduction, tensors: Tensors) -> tuple[Reduction, Tensors, float]:
    """Return a reduction, the tensors to reduce and the factor of its results.

    If the derivative depends on the values, torch multiplies by the factors, so that it
    differentiates them, too; otherwise the core does.
    """
    curved = reduction.op in CURVED and torch.is_grad_enabled()
    if not curved or not any(t.requires_grad for t in tensors):
        return reduction, tensors, 1.0
    plain = replace(reduction, prescale=1.0, postscale=1.0)
    return plain, [t * reduction.prescale for t in tensors], reduction.postscale


def run_scaled(
    kind: type[Reducing], reduction: Reduction, name: str | None, tensors: Tensors, *, grouped: bool
) -> list[torch.Tensor]:
    """Execute a reduction of this kind; its gradients include the factors."""
    plain, scaled, factor = _separate_factors(reduction, tensors)
    made = run(kind(plain, name, grouped=grouped), scaled)
    return made if factor == 1 else [tensor * factor for tensor in made]
