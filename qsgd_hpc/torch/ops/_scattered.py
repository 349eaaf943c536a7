"""Reducescatter as a differentiable collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qsgd_hpc import ops
from qsgd_hpc._base.eager import start_reducescatters
from qsgd_hpc._base.reduction import CURVED, Reduction, require_values
from qsgd_hpc.ops import Handle, Sum
from qsgd_hpc.torch.ops._allgather import Allgather
from qsgd_hpc.torch.ops._gradients import Collective, run
from qsgd_hpc.torch.ops._reduced import derivative
from qsgd_hpc.torch.ops._tensors import TENSORS

__all__ = ["Reducescatter"]

Tensors = Sequence[torch.Tensor]


class Reducescatter(Collective):
    """Reduces tensors and leaves each rank its share of the rows."""

    def __init__(self, reduction: Reduction, name: str | None, *, grouped: bool) -> None:
        require_values(reduction)
        sets = reduction.process_set
        super().__init__(ops.label("reducescatter", name, sets), sets, grouped=grouped)
        self._reduction = reduction
        self.needs_values = reduction.op in CURVED

    def start(self, tensors: Tensors) -> Handle:
        """Start reducing into new tensors."""
        return start_reducescatters(
            TENSORS, tensors, self._reduction, self._name, grouped=self._grouped
        )

    def gradient(self, index: int, gradient: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        """Return all ranks' shares of the gradient, times the derivative of a curved operation."""
        reduction, name, sets = self._reduction, self.gradient_name(index), self._process_set
        if reduction.op in CURVED:
            before, share = values
            (total,) = run(Allgather(name, sets, grouped=False, op=Sum), [gradient])
            (after,) = run(Allgather(f"{name}.results", sets, grouped=False, op=Sum), [share])
            return total * derivative(reduction.op, before, after, name, sets)
        (total,) = run(Allgather(name, sets, grouped=False), [gradient])
        ranks = len(ops.ranks_of(sets)) if reduction.op is Sum else 1
        return total * (reduction.prescale * reduction.postscale * ranks)
