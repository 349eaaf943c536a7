"""The Horovod API for PyTorch: ``import qsgd_hpc.torch as hvd``.

A Horovod script changes this import. Gradients are compressed if
``DistributedOptimizer`` is given ``compression=hvd.Compression.qsgd(bits=4)``, or, for a script
without that argument, if ``QSGD_BITS`` is set (``qsgd-hpc run --bits 4`` sets it).
"""

from qsgd_hpc.frameworks import common
from qsgd_hpc.frameworks.common import *
from qsgd_hpc.torch import elastic, functions, ops
from qsgd_hpc.torch.compression import Compression
from qsgd_hpc.torch.functions import *
from qsgd_hpc.torch.ops import *
from qsgd_hpc.torch.optimizer import DistributedOptimizer
from qsgd_hpc.torch.sync_batch_norm import SyncBatchNorm

__all__ = ["Compression", "DistributedOptimizer", "SyncBatchNorm", "elastic"]
__all__ += functions.__all__
__all__ += ops.__all__
__all__ += common.__all__
