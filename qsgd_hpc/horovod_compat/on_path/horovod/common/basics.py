"""``horovod.common.basics``: rank facts as methods of an object."""

from __future__ import annotations

from typing import Any

from qsgd_hpc.frameworks import common
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.basics import start_timeline, stop_timeline

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """The functions that every framework module has, as methods.

    Args:
        arguments: the paths of Horovod's compiled libraries; ignored.
    """

    init = staticmethod(basics.init)
    shutdown = staticmethod(basics.shutdown)
    is_initialized = staticmethod(basics.is_initialized)
    rank = staticmethod(basics.rank)
    size = staticmethod(basics.size)
    local_rank = staticmethod(basics.local_rank)
    local_size = staticmethod(basics.local_size)
    cross_rank = staticmethod(basics.cross_rank)
    cross_size = staticmethod(basics.cross_size)
    is_homogeneous = staticmethod(basics.is_homogeneous)
    start_timeline = staticmethod(start_timeline)
    stop_timeline = staticmethod(stop_timeline)
    mpi_threads_supported = staticmethod(common.mpi_threads_supported)
    mpi_enabled = staticmethod(common.mpi_enabled)
    mpi_built = staticmethod(common.mpi_built)
    gloo_enabled = staticmethod(common.gloo_enabled)
    gloo_built = staticmethod(common.gloo_built)
    nccl_built = staticmethod(common.nccl_built)
    ddl_built = staticmethod(common.ddl_built)
    ccl_built = staticmethod(common.ccl_built)
    cuda_built = staticmethod(common.cuda_built)
    rocm_built = staticmethod(common.rocm_built)

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
