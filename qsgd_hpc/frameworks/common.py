"""The part of the Horovod API that is the same in every framework's module.

NCCL, oneCCL, gloo and DDL are transports of Horovod. A script that finds one of them built selects
code that would be wrong with this package: see each function.
"""

from __future__ import annotations

from qsgd_hpc.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    NonFiniteGradientError,
    RankFailedError,
    UsageError,
)
from qsgd_hpc.launch.function import run
from qsgd_hpc.runtime import basics, feedback, gpu
from qsgd_hpc.runtime.basics import *
from qsgd_hpc.runtime.feedback import *
from qsgd_hpc.runtime.ops import Adasum, Average, Max, Min, Product, Sum
from qsgd_hpc.runtime.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)

__all__ = [
    "Adasum", "Average", "HorovodInternalError", "HostsUpdatedInterrupt", "Max", "Min",
    "NonFiniteGradientError", "ProcessSet", "Product", "RankFailedError", "Sum", "UsageError",
    "add_process_set", "ccl_built", "cuda_built", "ddl_built", "global_process_set", "gloo_built",
    "gloo_enabled", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built",
    "remove_process_set", "rocm_built", "run",
]  # fmt: skip
__all__ += basics.__all__
__all__ += feedback.__all__


def mpi_threads_supported() -> bool:
    """Return whether several threads of the script may call MPI themselves (mpi4py).

    Raises:
        UsageError: ``init`` has not been called.
    """
    module = basics.context().mpi.module
    return bool(module.Query_thread() >= module.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Return whether MPI starts the ranks and carries the messages: always True."""
    return True


def mpi_built(verbose: bool = False) -> bool:
    """Return whether there is support for MPI: always True."""
    return True


def gloo_enabled() -> bool:
    """Return whether gloo starts the ranks: always False."""
    return False


def gloo_built(verbose: bool = False) -> bool:
    """Return whether there is support for gloo: always False."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """Return 0, whether or not NCCL carries GPU tensors (``qsgd-hpc doctor`` prints the transport).

    Scripts call this to decide whether to multiply Adasum's learning rate by ``local_size()``,
    because Horovod's Adasum with NCCL sums the gradients of a node. This package's Adasum combines
    the gradients of all ranks.
    """
    return 0


def ddl_built(verbose: bool = False) -> bool:
    """Return whether there is support for IBM's DDL: always False."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return whether there is support for oneCCL: always False."""
    return False


def cuda_built(verbose: bool = False) -> bool:
    """Return whether CUDA tensors are coded on their GPU, by the kernels of this installation.

    Without kernels, they are copied to the host and coded there.
    """
    return _has_kernels("CUDA")


def rocm_built(verbose: bool = False) -> bool:
    """Return whether AMD GPUs' tensors are coded on their GPU; see ``cuda_built``."""
    return _has_kernels("HIP")


def _has_kernels(platform: str) -> bool:
    library = gpu.library()
    return library is not None and gpu.platform(library).startswith(platform)
