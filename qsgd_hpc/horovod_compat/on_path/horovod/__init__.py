"""``horovod``, provided by qsgd-hpc."""

from qsgd_hpc.horovod_compat import install

install()

from qsgd_hpc.launch.function import run  # noqa: E402 (after install())

__all__ = ["run"]

# The release of Horovod whose documented behaviour this package has; scripts compare it.
__version__ = "0.28.1"
