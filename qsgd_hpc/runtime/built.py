"""Queries of Horovod's scripts about the build: features of this package, and the MPI in use.

NCCL, oneCCL and the rest are Horovod's ways to communicate. Scripts that ask for them take another
path, which would not suit what is done here: see each function.
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
    """Return 0, whether or not NCCL carries GPU tensors (``qsgd-hpc doctor`` says which does).

    Scripts ask this in order to multiply Adasum's learning rate by ``local_size()``, as Horovod's
    Adasum with NCCL adds up the gradients of a node. Adasum is among all ranks here.
    """
    return 0


def ddl_built(verbose: bool = False) -> bool:
    """Return whether there is support for IBM's DDL: no."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return whether there is support for oneCCL: no."""
    return False


def cuda_built(verbose: bool = False) -> bool:
    """Return whether CUDA tensors are coded on their GPU, by the kernels of this installation.

    Without kernels, they are copied to the host and coded there.
    """
    return _has_kernels("CUDA")


def rocm_built(verbose: bool = False) -> bool:
    """Return the same of AMD's GPUs."""
    return _has_kernels("HIP")


def _has_kernels(platform: str) -> bool:
    from qsgd_hpc.runtime import gpu  # and with it the core

    library = gpu.library()
    return library is not None and gpu.platform(library).startswith(platform)
