"""Starts allreduces of torch tensors: in which type they travel, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qsgd_hpc import ops
from qsgd_hpc._base.compressors import NoneCompressor
from qsgd_hpc._base.reduction import Reduction, coding_for, op_for
from qsgd_hpc._core import Coding
from qsgd_hpc.compression import Lossy
from qsgd_hpc.ops import Average, Handle, Op
from qsgd_hpc.torch.ops._tensors import buffer_of, deliver, moved_to, new_like, on_host

__all__ = ["compressor_for", "start_allreduces"]


class _Widened:
    """Carries integers as int64, whose sum does not wrap before it is divided."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.to(torch.int64), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor.to(context)


# The core has no arithmetic for these; int64 has room for their values.
_FOREIGN = {torch.uint16, torch.uint32}
_NARROW = {torch.uint8, torch.int8, torch.int16, torch.int32}


def compressor_for(tensor: torch.Tensor, op: Op, compression: Any) -> Any:
    """Return the pair of functions around the reduction of a tensor."""
    if tensor.dtype in _FOREIGN or (op is Average and tensor.dtype in _NARROW):
        return _Widened
    return NoneCompressor if isinstance(compression, Lossy) else compression


@dataclass
class _Prepared:
    """One tensor, ready to be handed to the core: what can be wrong with it is known by then."""

    tensor: torch.Tensor
    output: torch.Tensor | None
    travelling: torch.Tensor
    reduced: torch.Tensor
    compressor: Any
    context: Any
    device: torch.device  # where the compressor has left it, which may hold more there
    op: Op
    coding: Coding | None

    def start(self, reduction: Reduction, name: str, group: ops.Group | None) -> Handle:
        source = buffer_of(self.travelling)
        return ops.allreduce(
            source,
            source if self.reduced is self.travelling else buffer_of(self.reduced),
            name=name,
            op=self.op,
            prescale=reduction.prescale,
            postscale=reduction.postscale,
            coding=self.coding,
            check_finite=self.coding is not None,
            lasting=reduction.lasting,
            process_set=reduction.process_set,
            group=group,
            result=self._result,
        )

    def _result(self) -> torch.Tensor:
        if self.compressor is NoneCompressor:
            return deliver(self.reduced, self.tensor, self.output)
        with torch.no_grad():
            reduced = moved_to(self.device, self.reduced)
            back = self.compressor.decompress(reduced, self.context)
            return deliver(back, self.tensor, self.output)


def _prepare(
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    reduction: Reduction,
    coding: Coding | None,
) -> _Prepared:
    op = op_for(reduction.op, boolean=tensor.dtype == torch.bool)
    compressor = compressor_for(tensor, op, reduction.compression)
    compressed, context = tensor.detach(), None
    if compressor is not NoneCompressor:
        with torch.no_grad():
            compressed, context = compressor.compress(compressed)
    travelling = on_host(compressed)
    in_place = output is not None and travelling.data_ptr() == output.data_ptr()
    copied = travelling.data_ptr() != compressed.data_ptr()  # and so nobody else's
    reduced = travelling if in_place or copied else new_like(travelling)
    if not tensor.is_floating_point():
        coding = None
    return _Prepared(
        tensor, output, travelling, reduced, compressor, context, compressed.device, op, coding
    )


def start_allreduces(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor] | None,
    reduction: Reduction,
    name: str,
    *,
    grouped: bool,
) -> Handle:
    """Start reducing tensors into ``outputs``, or into new ones; the result is their list."""
    coding = coding_for(reduction)
    places: Sequence[torch.Tensor | None] = outputs or [None] * len(tensors)
    prepared = [_prepare(t, o, reduction, coding) for t, o in zip(tensors, places, strict=True)]
    group = ops.Group(name, len(prepared)) if grouped else None
    names = ops.member_names(name, len(prepared)) if grouped else [name]
    return Handle.together(
        [p.start(reduction, n, group) for p, n in zip(prepared, names, strict=True)]
    )
