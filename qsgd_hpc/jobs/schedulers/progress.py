"""The progress of a job, whether or not its scheduler answers, and of an array from its tasks."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from qsgd_hpc.jobs.model import Job, JobState, Progress
from qsgd_hpc.jobs.records.events import or_stopped
from qsgd_hpc.jobs.records.registry import write_file
from qsgd_hpc.jobs.schedulers.command import Answer

__all__ = [
    "aggregate",
    "is_settled",
    "left_out",
    "merged",
    "silent",
    "unclear",
    "unconfirmed",
    "unknown",
]

UNREAD_FILE = "unread_answer.txt"

# A scheduler may list a job only some time after it has accepted it.
SETTLE_S = 60.0


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


# If tasks ended differently, the first of these is the state of the array.
_WORST = (
    JobState.FAILED,
    JobState.NODE_FAIL,
    JobState.TIMEOUT,
    JobState.CANCELLED,
    JobState.LOST,
    JobState.STOPPED,
    JobState.COMPLETED,
)
NAMED = 3  # at most so many failed tasks are named


def aggregate(tasks: Mapping[int, Progress]) -> Progress:
    """Return the progress of an array of at least one task.

    QUEUED until a task has started, RUNNING until all have ended, then COMPLETED if all completed,
    else the worst end, with the exit code of the first task with this end.
    """
    tasks = {index: or_stopped(progress) for index, progress in tasks.items()}
    states = Counter(progress.state for progress in tasks.values())
    starts = [p.started_at for p in tasks.values() if p.started_at is not None]
    ends = [p.ended_at for p in tasks.values() if p.ended_at is not None]
    live = any(not state.ended for state in states)
    state = next((s for s in _WORST if s in states), JobState.QUEUED)
    if states.keys() == {JobState.QUEUED}:
        state = JobState.QUEUED
    elif live:
        state = JobState.RUNNING
    alike = [tasks[index] for index in sorted(tasks) if tasks[index].state is state]
    return Progress(
        state=state,
        exit_code=None if live else alike[0].exit_code,
        why=alike[0].why if state is JobState.QUEUED else _why(tasks),
        started_at=min(starts, default=None),
        ended_at=None if live else max(ends, default=None),
        tasks={s.value: states[s] for s in JobState if states[s]},
        bad_nodes=tuple(sorted({node for p in tasks.values() for node in p.bad_nodes})),
        restarts=max(progress.restarts for progress in tasks.values()),
    )


def _why(tasks: Mapping[int, Progress]) -> str:
    """Return how many tasks completed and which failed; empty if all completed."""
    done = {i for i in tasks if tasks[i].state is JobState.COMPLETED}
    if len(done) == len(tasks):
        return ""
    bad = [i for i in sorted(tasks) if tasks[i].state.ended and i not in done]
    words = [f"{len(done)} of {len(tasks)} tasks completed"]
    words += [f"task {index} {_end(tasks[index])}" for index in bad[:NAMED]]
    if len(bad) > NAMED:
        words.append(f"and {len(bad) - NAMED} more")
    return ", ".join(words)


def _end(progress: Progress) -> str:
    detail = "" if progress.exit_code is None else f" (exit code {progress.exit_code})"
    if progress.bad_nodes:
        detail = f" ({', '.join(progress.bad_nodes)})"
    return f"{progress.state.value}{detail}"
