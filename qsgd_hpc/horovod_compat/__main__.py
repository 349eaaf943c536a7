"""Run Python such that ``import horovod`` resolves to this package, under any launcher.

    mpiexec -n 4 python -m qsgd_hpc.horovod_compat train.py --epochs 3

All arguments are Python's: a script, or -m MODULE.
"""

from __future__ import annotations

import os
import sys

from qsgd_hpc.horovod_compat import FOLDER

__all__ = ["main"]


def main() -> None:
    """Execute Python with the arguments; its child processes inherit the setting."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m qsgd_hpc.horovod_compat SCRIPT [ARGUMENTS]")
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *([path] if path else [])])
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
