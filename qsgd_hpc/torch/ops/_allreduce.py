"""``allreduce`` in all its forms: new or in place, blocking or not, one tensor or a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qsgd_hpc.frameworks.compressors import NoneCompressor
from qsgd_hpc.frameworks.eager import start_allreduces
from qsgd_hpc.frameworks.reduction import Reduction, reduction_of
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Handle, Op
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.torch.ops._reduced import Allreduce, run_scaled
from qsgd_hpc.torch.ops._tensors import TENSORS

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]

Tensors = Sequence[torch.Tensor]


def _first(tensors: Tensors) -> torch.Tensor:
    return tensors[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = NoneCompressor,
) -> Handle:
    """Start an allreduce; ``synchronize`` returns its result as a new tensor."""
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return _start(reduction, name, [tensor], grouped=False, in_place=False).then(_first)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = NoneCompressor,
) -> Handle:
    """Start an allreduce that replaces ``tensor``; do not access it before ``synchronize``."""
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return _start(reduction, name, [tensor], grouped=False, in_place=True).then(_first)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the average (or ``op``) of every rank's ``tensor``; shapes must be equal.

    Its gradient is the same reduction of the ranks' output gradients, for Average and Sum.

    Args:
        tensor: any numeric dtype; unchanged.
        average: deprecated: ``op=hvd.Average`` (True) or ``op=hvd.Sum`` (False).
        name: pairs the calls of the ranks; default: by order.
        compression: one of ``hvd.Compression``.
        op: Average (default), Sum, Min, Max, Product or Adasum. Integers average towards zero.
        prescale_factor: multiplies every rank's tensor before the sum.
        postscale_factor: multiplies the result.
        process_set: the participating ranks; default: all.
    Raises:
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return run_scaled(Allreduce, reduction, name, [tensor], grouped=False)[0]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = NoneCompressor,
) -> torch.Tensor:
    """Replace ``tensor`` by the average (or ``op``) over the ranks; see :func:`allreduce`."""
    factors = prescale_factor, postscale_factor
    call = tensor, average, name, op, *factors, process_set, compression
    reduced: torch.Tensor = ops.run_now(allreduce_async_, *call)
    return reduced


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = NoneCompressor,
) -> Handle:
    """Start a ``grouped_allreduce``; ``synchronize`` returns its results as new tensors."""
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return _start(reduction, name, tensors, grouped=True, in_place=False)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = NoneCompressor,
) -> Handle:
    """Start a ``grouped_allreduce`` that replaces the tensors."""
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return _start(reduction, name, tensors, grouped=True, in_place=True)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors, which complete or fail together; see :func:`allreduce`."""
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return run_scaled(Allreduce, reduction, name, tensors, grouped=True)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = NoneCompressor,
) -> list[torch.Tensor]:
    """Replace several tensors by their reductions; see :func:`grouped_allreduce`."""
    factors = prescale_factor, postscale_factor
    handle = grouped_allreduce_async_(
        tensors, average, name, op, *factors, process_set, compression
    )
    reduced: list[torch.Tensor] = handle.wait()
    return reduced


def _start(
    reduction: Reduction, name: str | None, tensors: Tensors, *, grouped: bool, in_place: bool
) -> Handle:
    text = ops.label("allreduce", name, reduction.process_set)
    return start_allreduces(TENSORS, tensors, reduction, text, grouped=grouped, in_place=in_place)
