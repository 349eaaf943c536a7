"""qsgd-hpc: QSGD gradient compression, the Horovod API, batch jobs and scaling studies.

Importing this package starts nothing: no MPI, no CUDA, no logging. Training scripts import a
framework module (``import qsgd_hpc.torch as hvd``); the command line is ``qsgd-hpc --help``.
``qsgd_hpc.run(function, np=4)`` starts ranks from Python; ``qsgd_hpc.should_stop()`` returns
whether a training must stop because its job is about to end.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from qsgd_hpc.errors import EXIT_RESUBMIT

if TYPE_CHECKING:
    from qsgd_hpc.launch.function import run
    from qsgd_hpc.runtime.stopping import exit_for_resubmit, should_stop

__all__ = ["EXIT_RESUBMIT", "__version__", "exit_for_resubmit", "run", "should_stop"]

try:
    __version__ = version("qsgd-hpc")
except PackageNotFoundError:  # a source tree on sys.path that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "run":
        from qsgd_hpc.launch.function import run

        return run
    if name in ("exit_for_resubmit", "should_stop"):
        from qsgd_hpc.runtime import stopping

        return getattr(stopping, name)
    raise AttributeError(f"module 'qsgd_hpc' has no attribute {name!r}")
