"""Events that a job has written; valid even if its scheduler has deleted it or is silent."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import Any

from qsgd_hpc.errors import EXIT_RESUBMIT
from qsgd_hpc.jobs.endings import NO_MEMORY, PREEMPTED, dead_node, exit_words, node_words
from qsgd_hpc.jobs.model import Job, JobState, Progress

__all__ = [
    "end_of",
    "noted_at",
    "read_events",
    "task_counts",
    "task_progress",
    "why_not_run",
    "with_own_record",
]

CLOCKS_APART_S = 60.0
_ENDED_BY_PBS = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
_REMEDIES = (NO_MEMORY, PREEMPTED)  # say more than an exit code
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

    The scheduler has the last word on why a job was ended from outside; the job's record fills in
    what it does not know: times, that a part of a chain had nothing to do, the end of a job that
    vanished, and a failure that it calls a success.
    """
    if progress.state is JobState.FAILED and progress.exit_code == EXIT_RESUBMIT:
        # What every scheduler calls a failure is what the script wanted.
        progress = dataclasses.replace(progress, state=JobState.STOPPED)
    if job.scheduler == "local":
        return progress
    if job.request.array:
        return _array_against(job, progress)
    runs = _runs(job.directory)
    if not runs:
        return _with_lost_node(job, progress, ())
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
    progress = _against(progress, at["end"]) if "end" in at else progress
    return _with_lost_node(job, progress, at)


def _with_lost_node(job: Job, progress: Progress, names: Container[str]) -> Progress:
    """Return the end of a job that lost a node of PBS, which its output names.

    Only that of a job that was ended from outside is read: what a script prints is no node failure.
    """
    ended = progress.exit_code in (None, *_ENDED_BY_PBS) or "terminate" in names
    if job.scheduler != "pbs" or progress.state is not JobState.FAILED or not ended:
        return progress
    if (node := dead_node(job.log_path)) is None:
        return progress
    return dataclasses.replace(
        progress,
        state=JobState.NODE_FAIL,
        exit_code=None,
        why=node_words((node,)),
        bad_nodes=(node,),
    )


def _against(progress: Progress, end: dict[str, Any]) -> Progress:
    """Return the progress after what the job's script noted of its own end.

    The script's own exit code is exact; a scheduler may report that of a shell around the script.
    What the scheduler has seen besides, such as a walltime or too little memory, stays.
    """
    code, at = end.get("exit_code"), end.get("at")
    if not isinstance(code, int):
        return progress
    if progress.started_at and at and at < progress.started_at - CLOCKS_APART_S:
        return progress  # the end of an earlier run; this one has noted nothing
    own = f"the job's own record says exit code {code}"
    if progress.state is JobState.LOST:
        return _ended_by(progress, code, at)
    if progress.state is JobState.COMPLETED and code != 0:
        new = _ended_by(progress, code, at)
        return dataclasses.replace(new, why=f"{new.why}, though its scheduler says exit code 0")
    if progress.state is not JobState.FAILED or code == progress.exit_code:
        return progress
    if code == EXIT_RESUBMIT:
        return _ended_by(progress, code, at)
    if code == 0 or progress.exit_code is not None:
        return dataclasses.replace(progress, why=f"{progress.why or 'it failed'}; {own}")
    # A Slurm without accounting tells of a failure, but not of its exit code.
    new = _ended_by(progress, code, at)
    return dataclasses.replace(new, why=progress.why) if progress.why in _REMEDIES else new


def _array_against(job: Job, progress: Progress) -> Progress:
    """Return the end of an array whose scheduler calls all tasks complete, by their own records."""
    if progress.state is not JobState.COMPLETED:
        return progress
    codes = {n: _exit_code(job.directory / f"task-{n}") for n in range(len(job.request.tasks))}
    if not (bad := {n: code for n, code in codes.items() if code}):
        return progress
    first = next(iter(bad))
    why = f"task {first} noted exit code {bad[first]}, though its scheduler says 0"
    counts = Counter(end_of(code or 0)[0].value for code in codes.values())
    return dataclasses.replace(
        progress, state=JobState.FAILED, exit_code=bad[first], why=why, tasks=dict(counts)
    )


def _exit_code(directory: Path) -> int | None:
    """Return the exit code that the last run in a directory has noted; None: it has noted none."""
    runs = _runs(directory)
    code = runs[-1][-1].get("exit_code") if runs else None
    return code if isinstance(code, int) else None


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


def _ended_by(progress: Progress, code: int, at: float | None) -> Progress:
    state, why = end_of(code)
    return dataclasses.replace(
        progress, state=state, exit_code=code, why=why, ended_at=progress.ended_at or at
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
    code = last.get("exit_code")
    return _ended_by(running, code, last.get("at")) if isinstance(code, int) else running
