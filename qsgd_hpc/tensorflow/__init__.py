"""The Horovod API for TensorFlow 2 and its version 1 graphs: ``import qsgd_hpc.tensorflow as hvd``.

A Horovod script changes this import. Collectives work eagerly, in ``tf.function`` and in
sessions, and have gradients.
"""

from typing import Any

from qsgd_hpc.frameworks import common
from qsgd_hpc.frameworks.common import *
from qsgd_hpc.tensorflow import elastic, functions, ops
from qsgd_hpc.tensorflow.compression import Compression
from qsgd_hpc.tensorflow.functions import *
from qsgd_hpc.tensorflow.ops import *
from qsgd_hpc.tensorflow.optimizer import DistributedOptimizer
from qsgd_hpc.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "elastic",
]
__all__ += functions.__all__
__all__ += ops.__all__
__all__ += common.__all__


def __getattr__(name: str) -> Any:
    """Import names that need Keras on demand, so that scripts without Keras start faster."""
    if name == "SyncBatchNormalization":
        from qsgd_hpc.tensorflow.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    if name == "keras":  # hvd.keras.callbacks, of scripts that import horovod.tensorflow alone
        from qsgd_hpc import keras

        return keras
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
