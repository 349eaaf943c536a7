#!/usr/bin/env python3
"""Run a scaling study as jobs of a real Slurm that runs on this machine for that time.

    sudo benchmarks/scaling/on_slurm.py -o results/slurm            # the study of slurm.yaml
    sudo benchmarks/scaling/on_slurm.py -o results/own --separate slurm.yaml

All arguments are passed to `qsgd-hpc scale`; without a study file, slurm.yaml of this folder is
used. Needs root and `make slurm`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.slurm.bed import Bed, missing  # noqa: E402
from tests.slurm.profiles import PROFILE, SRUN  # noqa: E402


def main(words: list[str]) -> int:
    """Start the cluster, run the study on it, and stop it."""
    if set(words) & {"-h", "--help"}:
        print(__doc__.strip())
        return 0
    if why := missing():
        print(f"on_slurm.py: {why}", file=sys.stderr)
        return 2
    if not any(word.endswith((".yaml", ".yml")) for word in words):
        words = [*words, str(HERE / "slurm.yaml")]
    # A new folder, because the database's user may have no access to another user's home.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    bed = Bed(folder)
    home = Path(os.environ.setdefault("QSGD_HOME", str(folder / "home")))
    (home / "sites").mkdir(parents=True, exist_ok=True)
    # The cluster declares eight cores per node, but all nodes share this machine: one per rank.
    (home / "sites" / "slurm-here.yaml").write_text(PROFILE.replace("cores: 8", "cores: 1") + SRUN)
    try:
        bed.up()
        scale = [sys.executable, "-m", "qsgd_hpc", "scale", "--yes", "--site", "slurm-here"]
        environment = {**os.environ, **bed.variables}
        return subprocess.run([*scale, *words], env=environment, check=False).returncode
    finally:
        bed.down()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
