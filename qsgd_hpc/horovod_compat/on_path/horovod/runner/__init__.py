"""``horovod.runner``: starting ranks from Python."""

from qsgd_hpc.launch.function import run

__all__ = ["run"]
