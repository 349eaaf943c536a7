"""Stand in for a launcher: start processes with the variables that it sets, and nothing else.

Usage: standing_in.py LAUNCHER RANKS COMMAND...
Each rank's output is passed on whole, one after another; the exit code is the worst of theirs.
"""

from __future__ import annotations

import os
import subprocess
import sys


def variables(launcher: str, rank: int, ranks: int) -> dict[str, str]:
    """Return what a launcher sets in one of its ranks, all on this host."""
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": str(ranks), "SLURM_NPROCS": str(ranks)}
    task = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(ranks)}
    return {
        "nothing": {},
        "pals": {
            "PALS_APID": f"apid-{os.getpid()}",
            "PALS_RANKID": str(rank),
            "PALS_LOCAL_RANKID": str(rank),
            "PALS_LOCAL_SIZE": str(ranks),
            "PALS_NODEID": "0",
        },
        "srun": {**job, **task, **step, "SLURM_STEP_TASKS_PER_NODE": str(ranks)},
        # The shell of salloc, and a batch script: no ranks, though Slurm speaks of tasks.
        "salloc": job,
        "sbatch": {**job, **task},
        # A launcher that tells nothing, behind the wrapper of a job script.
        "submit": {"QSGD_RANKS": str(ranks)},
    }[launcher]


def main(launcher: str, ranks: int, command: list[str]) -> int:
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **variables(launcher, rank, ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    for process in started:
        out, err = process.communicate()
        sys.stdout.buffer.write(out)
        sys.stderr.buffer.write(err)
    return max(abs(process.returncode) for process in started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
