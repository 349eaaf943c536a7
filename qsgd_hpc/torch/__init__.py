"""The Horovod API for PyTorch: ``import qsgd_hpc.torch as hvd``.

A script made for Horovod changes this import. Gradients are compressed when
``DistributedOptimizer`` is given ``compression=hvd.Compression.qsgd(bits=4)``, or, for a script
that says nothing about it, when ``QSGD_BITS`` is set (``qsgd-hpc run --bits 4`` sets it).
"""

from qsgd_hpc.basics import (
    communication_stats,
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_library_version,
    rank,
    shutdown,
    size,
)
from qsgd_hpc.errors import (
    HorovodInternalError,
    NonFiniteGradientError,
    RankFailedError,
    UsageError,
)
from qsgd_hpc.ops import Average, Max, Min, Product, Sum, barrier
from qsgd_hpc.torch.compression import Compression
from qsgd_hpc.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from qsgd_hpc.torch.ops import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    poll,
    synchronize,
)
from qsgd_hpc.torch.optimizer import DistributedOptimizer

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "NonFiniteGradientError",
    "Product",
    "RankFailedError",
    "Sum",
    "UsageError",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "communication_stats",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_library_version",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]
