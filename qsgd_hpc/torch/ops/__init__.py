"""Collectives over torch tensors, blocking and asynchronous, most of them differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch._compile import _disable_dynamo

from qsgd_hpc.errors import HorovodInternalError, UsageError
from qsgd_hpc.frameworks.compressors import NoneCompressor
from qsgd_hpc.frameworks.eager import start_allreduces, start_broadcast
from qsgd_hpc.frameworks.reduction import Reduction, reduction_of
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Average, Handle, Op, Sum, barrier, poll, synchronize
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.torch.ops._differentiable import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Reducescatter,
    Splits,
    Tensors,
    run,
    run_scaled,
)
from qsgd_hpc.torch.ops._tensors import TENSORS

__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "join",
    "poll", "reducescatter", "reducescatter_async", "sparse_allreduce_async", "synchronize",
]  # fmt: skip


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
    return _start(reduction, name, [tensor]).then(_first)


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
    return _start(reduction, name, [tensor], in_place=True).then(_first)


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
    return run_scaled(Allreduce, reduction, name, [tensor])[0]


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
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    reduced: list[torch.Tensor] = ops.run_now(_start, reduction, name, [tensor], in_place=True)
    return reduced[0]


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
    return _start(reduction, name, tensors, grouped=True)


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
    reduction = reduction_of(name, op, average, *factors, process_set, compression)
    reduced: list[torch.Tensor]
    reduced = _start(reduction, name, tensors, grouped=True, in_place=True).wait()
    return reduced


def _start(reduction: Reduction, name: str | None, tensors: Tensors, **how: bool) -> Handle:
    text = ops.label("allreduce", name, reduction.process_set)
    return start_allreduces(TENSORS, tensors, reduction, text, **how)


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
    return Reducescatter(reduction, name).start([tensor]).then(_first)


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
    return run_scaled(Reducescatter, reduction, name, [tensor])[0]


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


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start reducing a sparse tensor; ``synchronize`` returns a new, coalesced one.

    Each rank's entries are sent, so this is efficient if ranks have few and different entries.

    Args:
        tensor: ``torch.sparse_coo``; shapes must be equal; the numbers of entries may differ.
        name: pairs the calls of the ranks; default: by order.
        op: Average or Sum.
        process_set: the participating ranks; default: all.
    Raises:
        UsageError: the tensor is dense, or another ``op``.
    """
    if tensor.layout is not torch.sparse_coo:
        raise UsageError(
            f"sparse_allreduce of a {tensor.layout} tensor: pass tensor.to_sparse_coo(), or reduce "
            "it with hvd.allreduce"
        )
    if op not in (Average, Sum):
        raise UsageError(f"sparse_allreduce(op={op!r}): choose hvd.Average or hvd.Sum")
    mine = tensor.detach().coalesce()
    text = f"sparse.{ops.label('sparse', name, process_set)}"
    gather = Allgather(text, process_set, grouped=True)

    def merged(gathered: list[torch.Tensor]) -> torch.Tensor:
        indices, values, shapes = gathered
        _require_equal(name or text, shapes.tolist(), ops.ranks_of(process_set))
        # No check needed: every rank's indices are within its shape, and all shapes are equal.
        entries = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)
        total = entries.coalesce()
        return total / len(shapes) if op is Average else total

    # Reading it does not wait for a device.
    shape = torch.tensor([tensor.shape], device="cpu")
    return gather.start([mine.indices().t(), mine.values(), shape]).then(merged)


def _require_equal(name: str, shapes: list[list[int]], ranks: list[int]) -> None:
    for rank, shape in zip(ranks, shapes, strict=True):
        if shape != shapes[0]:
            raise HorovodInternalError(
                f"sparse tensor '{name}': rank {rank} has shape {shape}, rank {ranks[0]} has "
                f"{shapes[0]}. Every rank must submit equal shapes."
            )


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an ``allgather``; ``synchronize`` returns its result."""
    handle = Allgather(name, process_set).start([tensor])
    return handle.then(lambda made: made[0])


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return every rank's ``tensor``, concatenated in rank order.

    Its gradient is this rank's rows of the mean of the ranks' output gradients.

    Args:
        tensor: any dtype; ranks may differ in the first dimension only. Scalars count as
            one row each.
        name: pairs the calls of the ranks; default: by order.
        process_set: the participating ranks; default: all.
    Raises:
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    return run(Allgather(name, process_set), [tensor])[0]


def grouped_allgather_async(
    tensors: Tensors,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a ``grouped_allgather``; ``synchronize`` returns its results."""
    return Allgather(name, process_set, grouped=True).start(tensors)


def grouped_allgather(
    tensors: Tensors,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Gather several tensors, which complete or fail together; see :func:`allgather`."""
    return run(Allgather(name, process_set, grouped=True), tensors)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an ``alltoall``; ``synchronize`` returns its result."""
    call = Alltoall(splits, name, process_set)
    return call.start([tensor]).then(lambda made: _with_splits(made[0], call, splits))


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send some rows of ``tensor`` to each rank; return the received rows, in rank order.

    Its gradient is the output gradient, sent back to the ranks of the rows.

    Args:
        tensor: at least one dimension; ranks may differ in the first one only.
        splits: number of rows for each rank of the process set, as a list or tensor; None
            sends the same number to each.
        name: pairs the calls of the ranks; default: by order.
        process_set: the participating ranks; default: all.
    Returns:
        The rows and, if ``splits`` were passed, the number of rows from each rank: int32, on the
        device of ``splits`` if that is a tensor, else on the CPU.
    Raises:
        UsageError: the sum of splits is not the number of rows (a ValueError, on this rank).
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    call = Alltoall(splits, name, process_set)
    return _with_splits(run(call, [tensor])[0], call, splits)


def _with_splits(
    made: torch.Tensor, call: Alltoall, splits: Splits
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if splits is None:
        return made
    place = splits.device if isinstance(splits, torch.Tensor) else None
    return made, torch.tensor(call.received, dtype=torch.int32, device=place)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start replacing ``tensor`` by root_rank's; do not access it before ``synchronize``."""
    text = ops.label("broadcast", name, process_set)
    return start_broadcast(TENSORS, tensor, root_rank, text, process_set, in_place=True)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a broadcast; ``synchronize`` returns root_rank's tensor as a new one."""
    text = ops.label("broadcast", name, process_set)
    return start_broadcast(TENSORS, tensor, root_rank, text, process_set)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Replace ``tensor`` by root_rank's; shapes must be equal."""
    call = TENSORS, tensor, root_rank, ops.label("broadcast", name, process_set), process_set
    received: torch.Tensor = ops.run_now(start_broadcast, *call, in_place=True)
    return received


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return root_rank's ``tensor``; shapes must be equal.

    Its gradient is the mean of the ranks' output gradients on the root, zeros on the others.

    Args:
        tensor: any dtype; unchanged.
        root_rank: a rank of the job that is in the process set.
        name: pairs the calls of the ranks; default: by order.
        process_set: the participating ranks; default: all.
    Raises:
        UsageError: root_rank is not in the set.
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    return run(Broadcast(root_rank, name, process_set), [tensor])[0]


def join(device: int = -1) -> int:
    """Announce that this rank has no more batches; return the last rank when all have joined.

    Until then it contributes zeros to the others' allreduces, which count in averages.
    Other collectives raise on the ranks that have not joined.

    Args:
        device: accepted for compatibility; zeros need no device.
    """
    return ops.join()


# torch.compile splits a program at these calls. It would trace them, once for each name.
globals().update({name: _disable_dynamo(globals()[name]) for name in __all__})
