"""The part of the Horovod API that is the same in every framework's module."""

from qsgd_hpc.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    NonFiniteGradientError,
    RankFailedError,
    UsageError,
)
from qsgd_hpc.launch.function import run
from qsgd_hpc.runtime import built, feedback
from qsgd_hpc.runtime.basics import (
    communication_stats,
    compression_stats,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_library_version,
    rank,
    shutdown,
    size,
    start_timeline,
    step_profile,
    stop_timeline,
)
from qsgd_hpc.runtime.built import *
from qsgd_hpc.runtime.feedback import *
from qsgd_hpc.runtime.ops import Adasum, Average, Max, Min, Product, Sum
from qsgd_hpc.runtime.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "NonFiniteGradientError",
    "ProcessSet",
    "Product",
    "RankFailedError",
    "Sum",
    "UsageError",
    "add_process_set",
    "communication_stats",
    "compression_stats",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_library_version",
    "rank",
    "remove_process_set",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "step_profile",
    "stop_timeline",
]
__all__ += built.__all__
__all__ += feedback.__all__
