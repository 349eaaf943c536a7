"""Jobs of PBS and Slurm sites from submission to end, on commands that replay recorded answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from qsgd_hpc import jobs
from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs import registry
from qsgd_hpc.jobs.schedulers import command

FIXTURES = Path(__file__).parent.parent / "fixtures"
REPLAY = """#!/bin/bash
here=$(dirname "$0")
name=$(basename "$0")
printf '%s\\n' "$PWD" "$@" > "$here/$name.argv"
cat "$here/$name.out"
cat "$here/$name.err" >&2
exit "$(cat "$here/$name.rc")"
"""
Replay = Callable[..., None]


@pytest.fixture
def replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replay:
    """Return a function that makes a command give a recorded answer from now on."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("QSGD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("QSGD_ACCOUNT", "myproject")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")

    def answer(name: str, recorded: str, out: str | None = None) -> None:
        target = tmp_path / "bin" / name
        target.write_text(REPLAY)
        target.chmod(0o755)
        for part in ("out", "err", "rc"):
            text = (FIXTURES / f"{recorded}.{part}").read_text("utf-8")
            target.with_suffix(f".{part}").write_text(out if part == "out" and out else text)

    return answer


def argv(tmp_path: Path, name: str) -> list[str]:
    """Return the working directory and the arguments of the last call."""
    return (tmp_path / "bin" / f"{name}.argv").read_text().splitlines()


def request(site: str) -> jobs.JobRequest:
    return jobs.JobRequest(Path("train.py"), nodes=8, site=site)


def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scheduler's time to learn of a new job be over."""
    monkeypatch.setattr(command, "SETTLE_S", 0.0)


def test_pbs_job_from_submission_to_cancel(replay: Replay, tmp_path: Path) -> None:
    replay("qsub", "pbs/qsub_ok", out="8.polaris-login-bed\n")
    job = jobs.submit(request("polaris"))
    assert argv(tmp_path, "qsub") == [
        str(tmp_path), "-o", str(job.log_path), str(job.script_path),
    ]  # fmt: skip
    replay("qstat", "pbs/running")
    assert jobs.get(job.id).state is jobs.JobState.RUNNING
    assert argv(tmp_path, "qstat")[1:] == ["-x", "-f", "-F", "json", "8.polaris-login-bed"]
    replay("qdel", "pbs/qdel_ok")
    jobs.cancel(job.id)
    assert argv(tmp_path, "qdel")[1:] == ["8.polaris-login-bed"]


def test_end_of_a_pbs_job_is_remembered_without_asking_again(
    replay: Replay, tmp_path: Path
) -> None:
    replay("qsub", "pbs/qsub_ok", out="10.polaris-login-bed\n")
    replay("qstat", "pbs/failed")
    job = jobs.submit(request("polaris"))
    assert jobs.wait([job.id])[0].exit_code == 3
    (tmp_path / "bin" / "qstat").unlink()
    assert jobs.get(job.id).state is jobs.JobState.FAILED


def test_pbs_job_that_vanished_is_lost_with_the_likely_reason(
    replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay("qsub", "pbs/qsub_ok", out="7.polaris-login-bed\n")
    replay("qstat", "pbs/vanished")
    job = jobs.submit(request("polaris"))
    assert jobs.get(job.id).state is jobs.JobState.QUEUED
    old(monkeypatch)
    lost = jobs.get(job.id)
    assert lost.state is jobs.JobState.LOST
    assert "routing queue" in lost.progress.why


def test_unreachable_scheduler_leaves_the_last_known_state(
    replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay("qsub", "pbs/qsub_ok", out="8.polaris-login-bed\n")
    replay("qstat", "pbs/running")
    job = jobs.submit(request("polaris"))
    jobs.get(job.id)
    old(monkeypatch)
    (tmp_path / "bin" / "qstat.out").write_text("")
    (tmp_path / "bin" / "qstat.err").write_text("qstat: cannot connect to server (errno=15010)")
    (tmp_path / "bin" / "qstat.rc").write_text("255")
    assert jobs.get(job.id).state is jobs.JobState.RUNNING


@pytest.mark.parametrize("recorded", ["qsub_no_account", "qsub_limits", "qsub_maxqueued"])
def test_refused_pbs_job_leaves_no_record(replay: Replay, recorded: str) -> None:
    replay("qsub", f"pbs/{recorded}")
    with pytest.raises(LaunchError, match=r"qsub refused the job: .*\n.*([Uu]se|range)"):
        jobs.submit(request("polaris"))
    assert registry.ids() == []


def test_slurm_job_from_submission_to_its_end(replay: Replay, tmp_path: Path) -> None:
    replay("sbatch", "slurm/sbatch_ok", out="6\n")
    job = jobs.submit(request("perlmutter"))
    log = str(job.log_path)
    assert argv(tmp_path, "sbatch")[1:] == [
        "--parsable", f"--output={log}", str(job.script_path),
    ]  # fmt: skip
    replay("squeue", "slurm/squeue_unknown")
    replay("sacct", "slurm/sacct_failed")
    ended = jobs.wait([job.id])[0]
    assert (ended.state, ended.exit_code) == (jobs.JobState.FAILED, 3)


def test_one_question_serves_all_jobs_of_a_scheduler(replay: Replay, tmp_path: Path) -> None:
    replay("sbatch", "slurm/sbatch_ok", out="4\n")
    jobs.submit(request("perlmutter"))
    replay("sbatch", "slurm/sbatch_ok", out="8\n")
    jobs.submit(request("perlmutter"))
    replay("squeue", "slurm/squeue_dep")
    replay("sacct", "slurm/sacct_running")
    states = [job.state for job in jobs.list_jobs()]
    assert states == [jobs.JobState.RUNNING, jobs.JobState.QUEUED]
    assert argv(tmp_path, "squeue")[-1] == "4,8"
    assert argv(tmp_path, "sacct")[-1] == "4"


def test_missing_scheduler_is_told_before_anything_is_registered(
    replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ValueError, match="qsub, which is not on PATH"):
        jobs.submit(request("polaris"))
    assert jobs.render(request("polaris")).startswith("#!/bin/bash")
    assert registry.ids() == []
