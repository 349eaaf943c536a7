"""What a job wrote itself, beside what its scheduler says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qsgd_hpc.jobs.events import read_events, with_own_record
from qsgd_hpc.jobs.model import Job, JobRequest, JobState, Progress

START = {"at": 100, "event": "start", "host": "nid1"}


def job(folder: Path, *events: object) -> Job:
    text = "".join(f"{json.dumps(event)}\n" for event in events)
    (folder / "events.jsonl").write_text(text)
    request = JobRequest(Path("train.py"), site="bed")
    return Job("bed-1", "bed", "slurm", request, folder, 90.0, Progress(JobState.RUNNING))


def ended(code: int) -> dict[str, object]:
    return {"at": 200, "event": "end", "exit_code": code}


@pytest.mark.parametrize(
    ("code", "state"),
    [(0, JobState.COMPLETED), (3, JobState.FAILED), (85, JobState.STOPPED)],
)
def test_a_job_that_vanished_ended_as_it_noted(tmp_path: Path, code: int, state: JobState) -> None:
    found = with_own_record(job(tmp_path, START, ended(code)), Progress(JobState.LOST, why="gone"))
    assert (found.state, found.exit_code, found.ended_at) == (state, code, 200)


def test_a_job_that_vanished_without_a_note_of_its_end_is_lost(tmp_path: Path) -> None:
    found = with_own_record(job(tmp_path, START), Progress(JobState.LOST, why="gone"))
    assert found.state is JobState.LOST


def test_a_failure_without_exit_code_gets_the_jobs_own(tmp_path: Path) -> None:
    found = with_own_record(job(tmp_path, START, ended(85)), Progress(JobState.FAILED))
    assert (found.state, found.exit_code) == (JobState.STOPPED, 85)


def test_a_timeout_stays_one_whatever_the_script_noted(tmp_path: Path) -> None:
    found = with_own_record(job(tmp_path, START, ended(143)), Progress(JobState.TIMEOUT))
    assert (found.state, found.exit_code) == (JobState.TIMEOUT, None)


def test_the_end_of_an_earlier_run_does_not_end_a_job_that_runs_again(tmp_path: Path) -> None:
    again = {**START, "at": 300}
    old = Progress(JobState.FAILED, 85, ended_at=200.0)
    found = with_own_record(job(tmp_path, START, {"at": 200, "event": "requeue"}, again), old)
    assert found.state is JobState.RUNNING
    new = Progress(JobState.COMPLETED, 0, ended_at=310.0)
    found = with_own_record(job(tmp_path, START, {"at": 200, "event": "requeue"}, again), new)
    assert (found.state, found.restarts) == (JobState.COMPLETED, 1)


def test_a_part_of_a_chain_with_nothing_to_do_says_so(tmp_path: Path) -> None:
    skip = {"at": 101, "event": "skip"}
    found = with_own_record(job(tmp_path, START, skip, ended(0)), Progress(JobState.COMPLETED, 0))
    assert "nothing was left to do" in found.why


def test_a_line_that_is_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(f'{json.dumps(START)}\n[1]\n{{"at": 1, "ev')
    assert read_events(tmp_path) == [START]
