"""Allgather, alltoall and broadcast of torch tensors."""

from __future__ import annotations

import torch

from qsgd_hpc.frameworks.eager import start_broadcast
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Handle
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.torch.ops._differentiable import Allgather, Alltoall, Broadcast, Splits, Tensors, run
from qsgd_hpc.torch.ops._tensors import TENSORS

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
]


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
    received: torch.Tensor
    received = ops.run_now(broadcast_async_, tensor, root_rank, name, process_set)
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
