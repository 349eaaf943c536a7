"""The Horovod API for MXNet, in part: ``import qsgd_hpc.mxnet as hvd``.

MXNet was retired in 2023, and this adapter is frozen with it: it is tested with MXNet 1.9.1, the
last release, and numpy 1.23.5, the last that MXNet can be imported with (docs/mxnet.md).
"""

try:
    import mxnet  # noqa: F401
except (ImportError, AttributeError) as error:  # AttributeError: a numpy without np.bool
    raise ImportError(
        f"qsgd_hpc.mxnet cannot import MXNet ({error}). It needs mxnet 1.9.1 and numpy 1.23.5 "
        "on Python 3.10 or 3.11: pip install 'qsgd-hpc[mxnet]' in a separate environment"
    ) from error

from qsgd_hpc.arrays._memory import Compression
from qsgd_hpc.frameworks import common
from qsgd_hpc.frameworks.common import *
from qsgd_hpc.mxnet import ops
from qsgd_hpc.mxnet.ops import *
from qsgd_hpc.mxnet.optimizer import DistributedOptimizer, DistributedTrainer, broadcast_parameters
from qsgd_hpc.runtime import objects
from qsgd_hpc.runtime.objects import *
from qsgd_hpc.runtime.ops import barrier, join

__all__ = ["Compression", "DistributedOptimizer", "DistributedTrainer", "barrier"]
__all__ += ["broadcast_parameters", "join"]
__all__ += objects.__all__
__all__ += ops.__all__
__all__ += common.__all__
