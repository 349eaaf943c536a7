"""qsgd-hpc: QSGD gradient compression, the Horovod API, batch jobs and scaling studies.

Importing this package starts nothing: no MPI, no CUDA, no logging. Training scripts import a
framework module (``import qsgd_hpc.torch as hvd``); the command line is ``qsgd-hpc --help``.
"""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("qsgd-hpc")
except PackageNotFoundError:  # a source tree on sys.path that was never installed
    __version__ = "0+unknown"
