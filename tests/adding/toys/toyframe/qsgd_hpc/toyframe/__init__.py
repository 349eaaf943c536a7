"""The Horovod API for toyframe: ``import qsgd_hpc.toyframe as hvd``."""

from qsgd_hpc.toyframe._calls import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)

from qsgd_hpc.frameworks import common
from qsgd_hpc.frameworks.common import *  # noqa: F403
from qsgd_hpc.frameworks.compressors import Choices as Compression
from qsgd_hpc.runtime.objects import allgather_object, broadcast_object

__all__ = [
    "Compression",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_object",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]
__all__ += common.__all__
