"""Resolve ``import horovod.torch as hvd`` in unchanged scripts to this package.

``qsgd-hpc run --horovod`` puts the folder ``on_path`` of this package in front of the ranks'
PYTHONPATH. The ``horovod`` package in it calls ``install()``, so this works for scripts, ``-m``,
``-c`` and the processes that a rank starts. ``python -m qsgd_hpc.horovod_compat train.py`` does the
same under any other launcher. A script that can be changed may call ``install()`` itself.
"""

from __future__ import annotations

import sys

from qsgd_hpc.errors import UsageError
from qsgd_hpc.horovod_compat.finder import FOLDER, HorovodFinder, other_horovod

__all__ = ["FOLDER", "install", "installed"]


def install() -> None:
    """Make ``horovod`` and its modules resolve to this package, in this process.

    Raises:
        UsageError: another Horovod has been imported already.
    """
    if installed():
        return
    origin = getattr(sys.modules.get("horovod"), "__file__", None)
    if origin is not None and not origin.startswith(str(FOLDER)):
        raise UsageError(
            f"{origin} is already imported; call qsgd_hpc.horovod_compat.install() before "
            "horovod is imported"
        )
    sys.meta_path.insert(0, HorovodFinder())
    hidden = other_horovod()
    if hidden:
        sys.stderr.write(
            f"qsgd-hpc: notice: `import horovod` loads qsgd-hpc, not the Horovod in {hidden}\n"
        )


def installed() -> bool:
    """Return whether ``horovod`` resolves to this package in this process."""
    return any(isinstance(finder, HorovodFinder) for finder in sys.meta_path)
