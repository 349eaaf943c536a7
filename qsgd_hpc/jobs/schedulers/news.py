"""The progress of a job if its scheduler answers, does not answer, or does not know the job."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import replace

from qsgd_hpc.jobs.model import Job, JobState, Progress
from qsgd_hpc.jobs.records.registry import write_file
from qsgd_hpc.jobs.schedulers.command import Answer

__all__ = [
    "is_settled",
    "left_out",
    "merged",
    "open_jobs",
    "silent",
    "unclear",
    "unconfirmed",
    "unknown",
]

UNREAD_FILE = "unread_answer.txt"

# A scheduler may list a job only some time after it has accepted it.
SETTLE_S = 60.0


def open_jobs(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs whose state can still change, including LOST ones."""
    return [job for job in jobs if not job.state.ended or job.state is JobState.LOST]


def merged(job: Job, new: Progress, scheduler_id: str) -> Progress:
    """Return the new progress, with earlier values that the new answer omits."""
    waiting = new.state is JobState.QUEUED
    old = job.progress
    return replace(
        new,
        scheduler_id=scheduler_id,
        started_at=None if waiting else new.started_at or old.started_at,
        restarts=_restarts(old, new),
    )


def _restarts(old: Progress, new: Progress) -> int:
    """Return the number of restarts, as the scheduler reports it or as observed."""
    seen = old.restarts
    if old.state is JobState.RUNNING:
        later = (new.started_at or 0) > (old.started_at or float("inf")) + 1
        seen += int(new.state is JobState.QUEUED or later)
    return max(new.restarts, old.restarts) if new.restarts else seen


def is_settled(job: Job) -> bool:
    """Return whether a scheduler that has accepted the job must list it by now."""
    return time.time() - job.submitted_at >= SETTLE_S


def silent(job: Job, scheduler: str, answer: Answer) -> Progress:
    """Return the recorded progress, with the reason why there is no newer one."""
    if answer.code == 0 and answer.out.strip():
        return unclear(job, f"{scheduler}'s answer cannot be parsed", answer)
    if answer.code == 0 and not answer.err:
        return left_out(job, scheduler)
    return unclear(job, f"{scheduler} does not answer: {answer.message}")


def unclear(job: Job, why: str, answer: Answer | None = None) -> Progress:
    """Return the recorded progress, with why the answer is unclear; save the answer, if given."""
    if answer is not None:
        kept = job.directory / UNREAD_FILE
        with contextlib.suppress(OSError):
            write_file(kept, f"{answer.out}\n{answer.err}")
            why += f"; it is kept in {kept}"
    return replace(job.progress, silence=why)


def left_out(job: Job, scheduler: str) -> Progress:
    """Return the recorded progress of a job that the answer does not mention."""
    what = f"job {job.progress.scheduler_id}" if job.progress.scheduler_id else "this job"
    return unclear(job, f"{scheduler} answers, but does not mention {what}")


def unknown(job: Job, hint: str) -> Progress:
    """Return the progress of a job that its scheduler does not know; LOST after a grace period."""
    if not is_settled(job):
        return job.progress
    return replace(job.progress, state=JobState.LOST, why=hint)


def unconfirmed(job: Job, scheduler: str) -> Progress:
    """Return the progress of a job that may have been submitted and was not found."""
    return unknown(
        job,
        f"{scheduler} did not confirm the submission and does not know the job; submit it again",
    )
