"""Run the points of a packed job, on its first node: ``python __main__.py PLAN``.

A job runs this file by its path, so it is alone in its folder: Python puts the folder of a script
on the module path.
"""

import sys
from pathlib import Path

from qsgd_hpc.scaling.run.driver import drive

if __name__ == "__main__":
    drive(Path(sys.argv[1]))
