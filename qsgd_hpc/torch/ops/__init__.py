"""Collectives over torch tensors, blocking and asynchronous, most of them differentiable."""

from __future__ import annotations

from qsgd_hpc import ops
from qsgd_hpc.ops import barrier, poll, synchronize
from qsgd_hpc.torch.ops._allgather import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
)
from qsgd_hpc.torch.ops._allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from qsgd_hpc.torch.ops._alltoall import alltoall, alltoall_async
from qsgd_hpc.torch.ops._broadcast import (
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)
from qsgd_hpc.torch.ops._reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from qsgd_hpc.torch.ops._sparse import sparse_allreduce_async

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]


def join(device: int = -1) -> int:
    """Say that this rank has no more batches; return, when all have said so, who was last.

    Until then it takes part in the others' allreduces with zeros, which count in averages.
    Every other collective raises on the ranks that are still at it.

    Args:
        device: accepted for compatibility; zeros need no device.
    """
    return ops.join()
