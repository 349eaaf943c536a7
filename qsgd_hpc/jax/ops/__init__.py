"""Collectives over JAX arrays: on concrete ones, blocking and asynchronous, and inside ``jit``."""

from __future__ import annotations

from qsgd_hpc import ops
from qsgd_hpc.jax.ops._moving import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_async,
    grouped_allgather,
    grouped_allgather_async,
)
from qsgd_hpc.jax.ops._reducing import (
    allreduce,
    allreduce_async,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from qsgd_hpc.ops import barrier, poll, synchronize

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]


def join() -> int:
    """Say that this rank has no more batches; return, when all have said so, who was last.

    Until then it takes part in the others' allreduces with zeros, which count in averages.
    Every other collective raises on the ranks that are still at it.
    """
    return ops.join()
