"""Allreduce as a differentiable collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from qsgd_hpc import basics, ops
from qsgd_hpc._base.reduction import CURVED, Reduction
from qsgd_hpc.errors import UsageError
from qsgd_hpc.ops import Adasum, Handle, Op, Product, Sum
from qsgd_hpc.process_sets import ProcessSet
from qsgd_hpc.torch.ops._allgather import Allgather
from qsgd_hpc.torch.ops._gradients import Collective, run
from qsgd_hpc.torch.ops._reduction import start_allreduces

__all__ = ["Allreduce", "derivatives", "run_scaled"]

Tensors = Sequence[torch.Tensor]


class Allreduce(Collective):
    """Reduces tensors over the ranks of a process set."""

    def __init__(self, reduction: Reduction, name: str | None, *, grouped: bool) -> None:
        self._reduction = reduction
        self._name = ops.label("allreduce", name, reduction.process_set)
        self._grouped = grouped
        self.needs_values = reduction.op in CURVED

    def start(self, tensors: Tensors) -> Handle:
        """Start reducing into new tensors."""
        return start_allreduces(tensors, None, self._reduction, self._name, grouped=self._grouped)

    def gradients(self, gradients: Tensors, values: Tensors) -> Tensors:
        """Reduce the gradients as the tensors were; for curved operations, by their sum."""
        reduction, name = self._reduction, f"{self._name}.gradient"
        if reduction.op is Adasum:
            raise UsageError("Adasum has no gradient; pass tensor.detach(), or reduce by a sum")
        if reduction.op not in CURVED:
            return run(Allreduce(reduction, name, grouped=self._grouped), gradients)
        sums = Allreduce(replace(reduction, op=Sum), name, grouped=self._grouped)
        totals = run(sums, gradients)
        inputs, outputs = values[: len(totals)], values[len(totals) :]
        slopes = derivatives(reduction.op, inputs, outputs, name, reduction.process_set)
        return [total * slope for total, slope in zip(totals, slopes, strict=True)]


def derivatives(
    op: Op, inputs: Tensors, outputs: Tensors, name: str, process_set: ProcessSet
) -> list[torch.Tensor]:
    """Return by how much the results of a curved operation change with this rank's tensors.

    Ranks that hold the extremum together share its derivative, as in ``torch.amax``.
    """
    if op is Product:
        mine = ops.ranks_of(process_set).index(basics.rank())
        rows = [x.unsqueeze(0) for x in inputs]
        everyone = run(Allgather(f"{name}.factors", process_set, grouped=True), rows)
        return [torch.cat([x[:mine], x[mine + 1 :]]).prod(0) for x in everyone]
    with torch.no_grad():
        holds = [(x == y).to(x.dtype) for x, y in zip(inputs, outputs, strict=True)]
        count = Allreduce(Reduction(Sum, process_set=process_set), f"{name}.ties", grouped=True)
        return [h / n for h, n in zip(holds, run(count, holds), strict=True)]


def _with_factors_apart(reduction: Reduction, tensors: Tensors) -> tuple[Reduction, Tensors, float]:
    """Return a reduction, tensors to reduce and the factor of its results.

    Where the derivative depends on the values, scaling them is left to torch.
    """
    curved = reduction.op in CURVED and torch.is_grad_enabled()
    if not curved or not any(t.requires_grad for t in tensors):
        return reduction, tensors, 1.0
    plain = replace(reduction, prescale=1.0, postscale=1.0)
    return plain, [t * reduction.prescale for t in tensors], reduction.postscale


def run_scaled(
    call: Callable[[Reduction], Collective], reduction: Reduction, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Carry out what ``call`` makes of the reduction, with factors where gradients see them."""
    plain, scaled, factor = _with_factors_apart(reduction, tensors)
    made = run(call(plain), scaled)
    return made if factor == 1 else [tensor * factor for tensor in made]
