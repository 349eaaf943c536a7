"""The Horovod API for Keras 3: ``import qsgd_hpc.keras as hvd``.

For both ``keras`` and ``tensorflow.keras``, on the backends TensorFlow, PyTorch and JAX. A script
changes this import, and passes a ``hvd.DistributedOptimizer`` to ``model.compile``.
"""

from qsgd_hpc.frameworks import common
from qsgd_hpc.frameworks.common import *
from qsgd_hpc.keras import _values, callbacks, elastic
from qsgd_hpc.keras._backend import BACKEND
from qsgd_hpc.keras._values import *
from qsgd_hpc.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from qsgd_hpc.runtime import objects
from qsgd_hpc.runtime.objects import *

__all__ = ["Compression", "DistributedOptimizer", "PartialDistributedOptimizer"]
__all__ += ["callbacks", "elastic", "load_model"]
__all__ += objects.__all__
__all__ += _values.__all__
__all__ += common.__all__

Compression = BACKEND.Compression
