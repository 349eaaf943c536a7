"""What a job wrote down itself; it holds when its scheduler has forgotten the job or is silent."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import Any

from qsgd_hpc._exit_codes import EXIT_RESUBMIT
from qsgd_hpc.jobs.model import Job, JobState, Progress
from qsgd_hpc.jobs.schedulers.endings import exit_words

__all__ = [
    "end_of",
    "noted_at",
    "read_events",
    "task_counts",
    "task_progress",
    "why_not_run",
    "with_own_record",
]

SKIPPED_WHY = "nothing was left to do: the part before it had finished the training"


def read_events(directory: Path) -> list[dict[str, Any]]:
    """Return the events in the order of writing; a line that is cut short is left out."""
    found = []
    try:
        lines = (directory / "events.jsonl").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            found.append(event)
    return found


def noted_at(directory: Path) -> float:
    """Return when the job last noted something, by the file system's clock; 0: not yet."""
    try:
        return (directory / "events.jsonl").stat().st_mtime
    except OSError:
        return 0.0


def with_own_record(job: Job, progress: Progress) -> Progress:
    """Return the progress, completed by what the job itself recorded.

    The scheduler has the last word on what it says; the job's record fills in what it does not
    know: times, that a part of a chain had nothing to do, and the end of a job that vanished.
    """
    if progress.state is JobState.FAILED and progress.exit_code == EXIT_RESUBMIT:
        # What every scheduler calls a failure is what the script wanted.
        progress = dataclasses.replace(progress, state=JobState.STOPPED)
    if job.scheduler == "local" or job.request.array:
        return progress
    runs = _runs(job.directory)
    if not runs:
        return progress
    at = {event["event"]: event for event in runs[-1]}
    started_at = at.get("start", {}).get("at")
    if progress.state.ended and started_at and (progress.ended_at or started_at) < started_at:
        return job.progress  # the end of an earlier run: the scheduler has started it again since
    progress = dataclasses.replace(
        progress,
        started_at=progress.started_at or started_at,
        restarts=max(progress.restarts, len(runs) - 1),
    )
    if why := why_not_run(job, progress.state, at):
        return dataclasses.replace(progress, why=why)
    if "end" not in at:
        return progress
    # A Slurm without accounting tells of a failure, but not of its exit code.
    untold = progress.state is JobState.FAILED and progress.exit_code is None
    lost = progress.state is JobState.LOST
    return _ended_by(progress, at["end"]) if untold or lost else progress


def _runs(directory: Path) -> list[list[dict[str, Any]]]:
    """Return the events of each start of the job: a scheduler may start it again."""
    runs: list[list[dict[str, Any]]] = []
    for event in read_events(directory):
        if event["event"] == "start" or not runs:
            runs.append([])
        runs[-1].append(event)
    return runs


def why_not_run(job: Job, state: JobState, names: Container[str]) -> str | None:
    """Return why a part of a chain did not run its script, by the names of its events."""
    if "skip" in names and state is JobState.COMPLETED:
        return SKIPPED_WHY
    if "refuse" in names and state is JobState.FAILED:
        return f"not run, because {job.previous} failed"
    return None


def _ended_by(progress: Progress, end: dict[str, Any]) -> Progress:
    code = end.get("exit_code")
    if not isinstance(code, int):
        return progress
    state, why = end_of(code)
    return dataclasses.replace(
        progress, state=state, exit_code=code, why=why, ended_at=end.get("at")
    )


def end_of(exit_code: int) -> tuple[JobState, str]:
    """Return what an exit code of a job script means: the state, and why."""
    if exit_code == 0:
        return JobState.COMPLETED, ""
    state = JobState.STOPPED if exit_code == EXIT_RESUBMIT else JobState.FAILED
    return state, exit_words(exit_code)


def task_counts(job: Job) -> dict[str, int]:
    """Return how many tasks of an array are in each state, by the tasks' own records."""
    states = (task_progress(job, n).state for n in range(len(job.request.tasks)))
    return dict(Counter(state.value for state in states))


def task_progress(job: Job, task: int) -> Progress:
    """Return how far a task of an array is by its own record."""
    runs = _runs(job.directory / f"task-{task}")
    if not runs:
        return Progress()
    first, last = runs[-1][0], runs[-1][-1]
    running = Progress(JobState.RUNNING, started_at=first.get("at"))
    return _ended_by(running, last) if last["event"] == "end" else running
