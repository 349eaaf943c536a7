"""Collectives over TensorFlow's tensors, eagerly and in graphs, with gradients."""

from __future__ import annotations

from qsgd_hpc.ops import barrier
from qsgd_hpc.tensorflow.ops import _gradients  # noqa: F401  (registers them)
from qsgd_hpc.tensorflow.ops._allgather import allgather, grouped_allgather
from qsgd_hpc.tensorflow.ops._allreduce import allreduce, grouped_allreduce
from qsgd_hpc.tensorflow.ops._alltoall import alltoall
from qsgd_hpc.tensorflow.ops._broadcast import broadcast, broadcast_
from qsgd_hpc.tensorflow.ops._ranks import (
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from qsgd_hpc.tensorflow.ops._reducescatter import grouped_reducescatter, reducescatter

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
