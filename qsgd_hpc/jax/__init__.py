"""The Horovod API for JAX: ``import qsgd_hpc.jax as hvd``.

Every collective works on concrete arrays and inside ``jax.jit``; ``DistributedOptimizer`` wraps an
optax optimizer. Gradients are compressed if it is given
``compression=hvd.Compression.qsgd(bits=4)``, or, for a script without that argument, if
``QSGD_BITS`` is set (``qsgd-hpc run --bits 4`` sets it).
"""

from qsgd_hpc.frameworks import common
from qsgd_hpc.frameworks.common import *
from qsgd_hpc.jax import elastic, functions, ops
from qsgd_hpc.jax.compression import Compression
from qsgd_hpc.jax.errors import translated_errors
from qsgd_hpc.jax.functions import *
from qsgd_hpc.jax.gradients import allreduce_gradients
from qsgd_hpc.jax.job import init, shutdown
from qsgd_hpc.jax.ops import *
from qsgd_hpc.jax.optimizer import DistributedOptimizer

__all__ = ["Compression", "DistributedOptimizer", "allreduce_gradients", "elastic"]
__all__ += ["init", "shutdown", "translated_errors"]
__all__ += functions.__all__
__all__ += ops.__all__
__all__ += common.__all__
