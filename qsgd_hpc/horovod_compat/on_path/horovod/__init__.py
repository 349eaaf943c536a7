"""``horovod``, as qsgd-hpc stands in for it."""

from qsgd_hpc.horovod_compat import install

install()

from qsgd_hpc.launch.function import run  # noqa: E402 (names resolve here from now on)

__all__ = ["run"]

# Scripts compare it: the release of Horovod whose documented behaviour this package has.
__version__ = "0.28.1"
