"""Collectives over plain arrays, without a framework: ``import qsgd_hpc.arrays as hvd``.

An array is any object that exposes its memory: numpy arrays, and objects with DLPack or the buffer
protocol (``array.array``, ``bytearray``, CuPy arrays in host memory, tensors of other frameworks).
Results are numpy arrays; functions that end in ``_`` write to their argument.
"""

from qsgd_hpc.arrays import _collectives
from qsgd_hpc.arrays._collectives import *
from qsgd_hpc.arrays._memory import Compression
from qsgd_hpc.frameworks import common
from qsgd_hpc.frameworks.common import *
from qsgd_hpc.runtime import objects
from qsgd_hpc.runtime.objects import *
from qsgd_hpc.runtime.ops import barrier, join, poll, synchronize

__all__ = ["Compression", "barrier", "join", "poll", "synchronize"]
__all__ += objects.__all__
__all__ += _collectives.__all__
__all__ += common.__all__
