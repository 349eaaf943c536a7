"""The Horovod API for Keras 3: ``import qsgd_hpc.keras as hvd``.

For ``keras`` and ``tensorflow.keras`` alike, on the backends TensorFlow, PyTorch and JAX. A script
changes this import, and gives ``model.compile`` a ``hvd.DistributedOptimizer``.
"""

from qsgd_hpc import _common
from qsgd_hpc._common import *
from qsgd_hpc.keras import callbacks, elastic
from qsgd_hpc.keras._backend import BACKEND
from qsgd_hpc.keras._values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from qsgd_hpc.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from qsgd_hpc.keras.saving import load_model
from qsgd_hpc.objects import allgather_object, broadcast_object

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += _common.__all__

Compression = BACKEND.Compression
