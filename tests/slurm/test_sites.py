"""Profiles beside what a real Slurm says, and jobs through the pinning wrapper."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from qsgd_hpc import jobs
from qsgd_hpc.jobs import JobRequest, JobState
from tests.slurm.bed import Bed


def cli(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qsgd_hpc", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **env},
    )


def test_a_profile_written_from_the_live_slurm_agrees_with_it_and_runs_jobs(bed: Bed) -> None:
    made = cli("sites", "new", "fresh")
    assert made.returncode == 0, made
    checked = cli("sites", "check", "fresh")
    assert checked.returncode == 0, checked.stdout
    Path("runs.py").write_text("print('ran')")
    job = jobs.submit(JobRequest(Path("runs.py"), site="fresh", account="myproject_g", nodes=2))
    (done,) = jobs.wait([job.id], 240)
    assert done.state is JobState.COMPLETED, done
    assert "ran" in done.log_path.read_text()


def test_what_a_profile_says_wrongly_is_found(bed: Bed) -> None:
    made = cli("sites", "new", "fresh", "--stdout").stdout
    profile = Path(os.environ["QSGD_HOME"], "sites", "wrong.yaml")
    profile.write_text(made.replace("[1, 4]", "[1, 400]"))
    checked = cli("sites", "check", "wrong")
    assert checked.returncode == 1, checked.stdout
    assert "400" in checked.stdout


def test_an_unknown_machine_with_slurm_gets_the_generic_profile_and_is_told(bed: Bed) -> None:
    Path("runs.py").write_text("print('ran')")
    said = cli("submit", "--json", "--account", "myproject_g", "runs.py", QSGD_SITE="")
    assert said.returncode == 0, said
    assert "sites new NAME" in said.stderr
    (job,) = jobs.list_jobs()
    assert job.site == "slurm"
    assert jobs.wait([job.id], 240)[0].state is JobState.COMPLETED


def test_verify_pinning_draws_where_each_rank_sits(bed: Bed) -> None:
    shown = cli("submit", "--nodes", "2", "--ranks-per-node", "2", "--verify-pinning", "x.py")
    assert "there is no script" in shown.stderr
    Path("x.py").write_text("")
    shown = cli("submit", "--nodes", "2", "--ranks-per-node", "2", "--verify-pinning", "x.py")
    assert "2 equal nodes: nid0001, nid0002" in shown.stdout, shown
    assert "not bound" in shown.stdout
