"""Collectives over TensorFlow's tensors, eagerly and in graphs, with gradients."""

from __future__ import annotations

from qsgd_hpc.runtime.ops import barrier
from qsgd_hpc.tensorflow.ops import _allgather, _allreduce, _broadcast, _ranks, _reducescatter
from qsgd_hpc.tensorflow.ops import _gradients as _gradients  # registers them
from qsgd_hpc.tensorflow.ops._allgather import *
from qsgd_hpc.tensorflow.ops._allreduce import *
from qsgd_hpc.tensorflow.ops._alltoall import alltoall
from qsgd_hpc.tensorflow.ops._broadcast import *
from qsgd_hpc.tensorflow.ops._ranks import *
from qsgd_hpc.tensorflow.ops._reducescatter import *

__all__ = ["alltoall", "barrier"]
__all__ += _allgather.__all__
__all__ += _allreduce.__all__
__all__ += _broadcast.__all__
__all__ += _ranks.__all__
__all__ += _reducescatter.__all__
