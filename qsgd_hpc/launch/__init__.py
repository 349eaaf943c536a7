"""Start ranks with the MPI in use: ``qsgd-hpc run``. Imports neither MPI nor a framework."""

from qsgd_hpc.launch.command import build_command
from qsgd_hpc.launch.options import RunOptions
from qsgd_hpc.launch.run import run

__all__ = ["RunOptions", "build_command", "run"]
