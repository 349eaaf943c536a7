"""The Horovod API for JAX: ``import qsgd_hpc.jax as hvd``.

Every collective works on concrete arrays and inside ``jax.jit``; ``DistributedOptimizer`` wraps an
optax optimizer. Gradients are compressed if it is given
``compression=hvd.Compression.qsgd(bits=4)``, or, for a script without that argument, if
``QSGD_BITS`` is set (``qsgd-hpc run --bits 4`` sets it).
"""

import jax

from qsgd_hpc.errors import UsageError

if jax.__version_info__ < (0, 5, 1):
    raise UsageError(
        f"qsgd_hpc.jax needs JAX 0.5.1 or newer, whose programs go on while a collective waits; "
        f"this is {jax.__version__}"
    )

from qsgd_hpc.frameworks import common
from qsgd_hpc.frameworks.common import *
from qsgd_hpc.jax import elastic, functions, ops
from qsgd_hpc.jax.compression import Compression
from qsgd_hpc.jax.functions import *
from qsgd_hpc.jax.job import init, shutdown, translated_errors
from qsgd_hpc.jax.ops import *
from qsgd_hpc.jax.optimizer import DistributedOptimizer, allreduce_gradients

__all__ = ["Compression", "DistributedOptimizer", "allreduce_gradients", "elastic"]
__all__ += ["init", "shutdown", "translated_errors"]
__all__ += functions.__all__
__all__ += ops.__all__
__all__ += common.__all__
