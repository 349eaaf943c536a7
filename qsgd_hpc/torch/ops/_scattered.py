"""Reducescatter as a differentiable collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qsgd_hpc import ops
from qsgd_hpc._base.reduction import CURVED, Reduction, op_for, require_values
from qsgd_hpc.ops import Handle, Op, Sum
from qsgd_hpc.torch.ops._allgather import Allgather
from qsgd_hpc.torch.ops._gradients import Collective, run
from qsgd_hpc.torch.ops._reduced import derivative
from qsgd_hpc.torch.ops._reduction import compressor_for
from qsgd_hpc.torch.ops._tensors import (
    as_rows,
    buffer_of,
    deliver,
    moved_to,
    on_host,
    tensor_from,
)

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
        prepared = [_prepare(t, self._reduction) for t in tensors]
        names, group = self.members(len(prepared))
        return Handle.together(
            [p.start(self._reduction, n, group) for p, n in zip(prepared, names, strict=True)]
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


@dataclass(frozen=True)
class _Prepared:
    """One tensor, ready to be handed to the core: what can be wrong with it is known by then."""

    tensor: torch.Tensor
    host: torch.Tensor
    compressor: Any
    context: Any
    device: torch.device  # where the compressor has left it, which may hold more there
    op: Op

    def start(self, reduction: Reduction, name: str, group: ops.Group | None) -> Handle:
        return ops.reducescatter(
            buffer_of(self.host),
            name=name,
            op=self.op,
            prescale=reduction.prescale,
            postscale=reduction.postscale,
            process_set=reduction.process_set,
            group=group,
            result=self._result,
        )

    def _result(self, received: ops.Received) -> torch.Tensor:
        with torch.no_grad():
            share = moved_to(self.device, tensor_from(received, self.host))
            return deliver(self.compressor.decompress(share, self.context), self.tensor, None)


def _prepare(tensor: torch.Tensor, reduction: Reduction) -> _Prepared:
    op = op_for(reduction.op, boolean=tensor.dtype == torch.bool)
    compressor = compressor_for(tensor, op, reduction.compression)
    with torch.no_grad():
        compressed, context = compressor.compress(as_rows(tensor, "reducescatter").detach())
    return _Prepared(tensor, on_host(compressed), compressor, context, compressed.device, op)
