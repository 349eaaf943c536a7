"""The Horovod API for JAX: ``import qsgd_hpc.jax as hvd``.

Every collective works on concrete arrays and inside ``jax.jit``; ``DistributedOptimizer`` wraps an
optax optimizer. Gradients are compressed when it is given
``compression=hvd.Compression.qsgd(bits=4)``, or, for a script that says nothing about it, when
``QSGD_BITS`` is set (``qsgd-hpc run --bits 4`` sets it).
"""

from qsgd_hpc import _common
from qsgd_hpc._common import *
from qsgd_hpc.jax import elastic
from qsgd_hpc.jax.compression import Compression
from qsgd_hpc.jax.errors import translated_errors
from qsgd_hpc.jax.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from qsgd_hpc.jax.gradients import allreduce_gradients
from qsgd_hpc.jax.job import init, shutdown
from qsgd_hpc.jax.ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from qsgd_hpc.jax.optimizer import DistributedOptimizer

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "allreduce_gradients",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "synchronize",
    "translated_errors",
]
__all__ += _common.__all__
