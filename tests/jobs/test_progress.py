"""What becomes of a job's record when its scheduler answers, is silent, or knows no such job."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from qsgd_hpc.jobs.model import Job, JobRequest, JobState, Progress
from qsgd_hpc.jobs.registry import progress_from_json, progress_to_json
from qsgd_hpc.jobs.schedulers.common import Answer, merged, silent, unknown
from qsgd_hpc.jobs.schedulers.slurm_answers import parse_squeue

S = JobState
DOWN = Answer("", "Connection refused\n", 1)


def job_with(progress: Progress, age_s: float = 1000.0) -> Job:
    asked = JobRequest(Path("train.py"))
    return Job("s-1", "s", "slurm", asked, Path("/j"), time.time() - age_s, progress)


@pytest.mark.parametrize("state", list(S))
def test_only_an_end_that_was_seen_is_for_ever(state: S) -> None:
    assert state.final == (state not in (S.QUEUED, S.RUNNING, S.LOST))


def test_a_silence_keeps_all_that_is_known_and_is_never_recorded() -> None:
    running = Progress(S.RUNNING, why="x", started_at=1.0, scheduler_id="4", restarts=2)
    hushed = silent(job_with(running), "Slurm", DOWN)
    assert hushed == dataclasses.replace(running, silence=hushed.silence)
    assert hushed.silence == "Slurm does not answer: Connection refused"
    assert progress_from_json(progress_to_json(hushed)) == running


def test_a_job_is_lost_only_once_its_scheduler_must_know_it() -> None:
    queued = Progress(S.QUEUED, why="waits", scheduler_id="4")
    assert unknown(job_with(queued, age_s=0), "gone") == queued
    assert unknown(job_with(queued), "gone").state is S.LOST


@pytest.mark.parametrize(
    ("old", "new", "restarts", "started_at"),
    [
        (Progress(S.QUEUED), Progress(S.RUNNING, started_at=5.0), 0, 5.0),
        (Progress(S.RUNNING, started_at=5.0), Progress(S.RUNNING, started_at=5.0), 0, 5.0),
        (Progress(S.RUNNING, started_at=5.0), Progress(S.RUNNING), 0, 5.0),
        (Progress(S.RUNNING, started_at=5.0), Progress(S.RUNNING, started_at=99.0), 1, 99.0),
        (Progress(S.RUNNING, started_at=5.0), Progress(S.QUEUED), 1, None),
        (Progress(S.RUNNING, started_at=5.0), Progress(S.COMPLETED), 0, 5.0),
        (Progress(S.QUEUED, restarts=1), Progress(S.RUNNING, started_at=9.0), 1, 9.0),
        (Progress(S.QUEUED, restarts=1), Progress(S.RUNNING, restarts=1), 1, None),
        (Progress(S.RUNNING, restarts=1), Progress(S.FAILED, restarts=3), 3, None),
    ],
)
def test_restarts_are_counted_as_told_or_as_seen(
    old: Progress, new: Progress, restarts: int, started_at: float | None
) -> None:
    recorded = merged(job_with(old), new, "4")
    assert (recorded.restarts, recorded.started_at) == (restarts, started_at)
    assert recorded.scheduler_id == "4"


def test_the_start_that_slurm_expects_is_not_a_start() -> None:
    shown = parse_squeue(Answer("6|PENDING|Priority||2026-11-21T13:30:12||/x\n"))
    assert shown is not None
    assert shown["6"].started_at is None
