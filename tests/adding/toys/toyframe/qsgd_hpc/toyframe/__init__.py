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

from qsgd_hpc import _common
from qsgd_hpc._base.compressors import Choices as Compression
from qsgd_hpc._common import *  # noqa: F403
from qsgd_hpc.objects import allgather_object, broadcast_object

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
__all__ += _common.__all__
