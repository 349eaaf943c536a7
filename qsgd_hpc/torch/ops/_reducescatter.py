"""``reducescatter``: every rank gets its part of the rows of a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qsgd_hpc.frameworks.compressors import NoneCompressor
from qsgd_hpc.frameworks.eager import start_reducescatters
from qsgd_hpc.frameworks.reduction import CURVED, Reduction, reduction_of, require_values
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Handle, Op, Sum
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.torch.ops._allgather import Allgather
from qsgd_hpc.torch.ops._gradients import run
from qsgd_hpc.torch.ops._reduced import Reducing, derivative, run_scaled
from qsgd_hpc.torch.ops._tensors import TENSORS

__all__ = [
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]

Tensors = Sequence[torch.Tensor]


class Reducescatter(Reducing):
    """A reduction of tensors of which each rank gets its part of the rows."""

    kind = "reducescatter"

    def __init__(self, reduction: Reduction, name: str | None, *, grouped: bool) -> None:
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
            (total,) = run(Allgather(name, sets, grouped=False, op=Sum), [gradient])
            (after,) = run(Allgather(f"{name}.results", sets, grouped=False, op=Sum), [share])
            return total * derivative(reduction.op, before, after, name, sets)
        (total,) = run(Allgather(name, sets, grouped=False), [gradient])
        ranks = len(ops.ranks_of(sets)) if reduction.op is Sum else 1
        return total * (reduction.prescale * reduction.postscale * ranks)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = NoneCompressor,
    average: bool | None = None,
) -> Handle:
    """Start a ``reducescatter``; ``synchronize`` returns its result."""
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    handle = Reducescatter(reduction, name, grouped=False).start([tensor])
    return handle.then(lambda made: made[0])


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    average: bool | None = None,
) -> torch.Tensor:
    """Return this rank's rows of the average (or ``op``) of all ranks' tensors.

    Its gradient is the ranks' output gradients, gathered, times the factors; for Sum also times
    the number of ranks.

    Args:
        tensor: at least one dimension, unchanged; shapes must be equal. The rows are split as
            evenly as possible; the first ranks get one more.
        name: pairs the calls of the ranks; default: by order.
        compression: ``hvd.Compression.none``, ``fp16`` or ``bf16``, or a custom class.
        op: Average (default), Sum, Min, Max or Product.
        process_set: the participating ranks; default: all.
        prescale_factor: multiplies every rank's tensor before the sum.
        postscale_factor: multiplies the result.
        average: deprecated: ``op=hvd.Average`` (True) or ``op=hvd.Sum`` (False).
    Raises:
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return run_scaled(Reducescatter, reduction, name, [tensor], grouped=False)[0]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = NoneCompressor,
    average: bool | None = None,
) -> Handle:
    """Start a ``grouped_reducescatter``; ``synchronize`` returns its results."""
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return Reducescatter(reduction, name, grouped=True).start(tensors)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    average: bool | None = None,
) -> list[torch.Tensor]:
    """Reduce and scatter several tensors, which complete or fail together."""
    factors = prescale_factor, postscale_factor
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    return run_scaled(Reducescatter, reduction, name, tensors, grouped=True)
