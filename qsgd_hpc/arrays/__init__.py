"""Collectives over plain arrays, without a framework: ``import qsgd_hpc.arrays as hvd``.

An array is anything that shows its memory: numpy's, and what speaks DLPack or the buffer protocol
(``array.array``, ``bytearray``, CuPy's in the host's memory, tensors of other frameworks). Results
are numpy's; the forms that end in ``_`` write into what they were given.
"""

from qsgd_hpc import _common
from qsgd_hpc._common import *
from qsgd_hpc.arrays._moves import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from qsgd_hpc.arrays._reduced import Options
from qsgd_hpc.arrays._reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from qsgd_hpc.arrays.compression import Compression
from qsgd_hpc.objects import allgather_object, broadcast_object
from qsgd_hpc.ops import barrier, join, poll, synchronize

__all__ = [
    "Compression",
    "Options",
    "allgather",
    "allgather_async",
    "allgather_object",
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
    "broadcast_object",
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
    "synchronize",
]
__all__ += _common.__all__
