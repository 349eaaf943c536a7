"""Queries of Horovod's scripts about the build: features of this package, and the MPI in use.

NCCL, oneCCL and the rest are Horovod's ways to communicate; here everything travels over MPI and
shared memory, so scripts that ask take the path that suits that.
"""

from __future__ import annotations

from qsgd_hpc.runtime import basics

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_threads_supported() -> bool:
    """Return whether several threads of the script may call MPI themselves (mpi4py).

    Raises:
        UsageError: ``init`` has not been called.
    """
    module = basics.context().mpi.module
    return bool(module.Query_thread() >= module.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Return whether MPI starts the ranks and carries the messages: always."""
    return True


def mpi_built(verbose: bool = False) -> bool:
    """Return whether there is support for MPI: always."""
    return True


def gloo_enabled() -> bool:
    """Return whether gloo starts the ranks: never."""
    return False


def gloo_built(verbose: bool = False) -> bool:
    """Return whether there is support for gloo: no."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """Return the version of NCCL that reduces GPU tensors: 0, there is none."""
    return 0


def ddl_built(verbose: bool = False) -> bool:
    """Return whether there is support for IBM's DDL: no."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return whether there is support for oneCCL: no."""
    return False


def cuda_built(verbose: bool = False) -> bool:
    """Return whether the core is compiled with CUDA: no. GPU tensors are staged through memory."""
    return False


def rocm_built(verbose: bool = False) -> bool:
    """Return whether the core is compiled with ROCm: no. GPU tensors are staged through memory."""
    return False
