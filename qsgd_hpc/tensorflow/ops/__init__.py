"""Collectives over TensorFlow's tensors, eagerly and in graphs, with gradients."""

from __future__ import annotations

from qsgd_hpc.runtime.ops import barrier
from qsgd_hpc.tensorflow.ops import _gradients as _gradients  # registers them
from qsgd_hpc.tensorflow.ops import _moves, _reductions
from qsgd_hpc.tensorflow.ops._moves import *
from qsgd_hpc.tensorflow.ops._reductions import *

__all__ = ["barrier", *_moves.__all__, *_reductions.__all__]
