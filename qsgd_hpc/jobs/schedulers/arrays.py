"""Combine the progress of an array's tasks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from qsgd_hpc.jobs.model import JobState, Progress

__all__ = ["aggregate"]

# If tasks ended differently, the first of these is the state of the array.
_WORST = (
    JobState.FAILED,
    JobState.NODE_FAIL,
    JobState.TIMEOUT,
    JobState.CANCELLED,
    JobState.LOST,
    JobState.COMPLETED,
)
NAMED = 3  # at most so many failed tasks are named


def aggregate(tasks: Mapping[int, Progress]) -> Progress:
    """Return the progress of an array of at least one task.

    QUEUED until a task has started, RUNNING until all have ended, then COMPLETED if all completed,
    else the worst end, with the exit code of the first task with this end.
    """
    states = {progress.state for progress in tasks.values()}
    counted = Counter(progress.state for progress in tasks.values())
    starts = [p.started_at for p in tasks.values() if p.started_at is not None]
    ends = [p.ended_at for p in tasks.values() if p.ended_at is not None]
    live = any(not state.ended for state in states)
    state = next((s for s in _WORST if s in states), JobState.QUEUED)
    if states == {JobState.QUEUED}:
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
        tasks={s.value: counted[s] for s in JobState if counted[s]},
        bad_nodes=tuple(sorted({node for p in tasks.values() for node in p.bad_nodes})),
        restarts=max(progress.restarts for progress in tasks.values()),
    )


def _why(tasks: Mapping[int, Progress]) -> str:
    """Return how many tasks completed and which failed; empty if all completed."""
    done = sum(progress.state is JobState.COMPLETED for progress in tasks.values())
    if done == len(tasks):
        return ""
    bad = [i for i in sorted(tasks) if tasks[i].state.ended and _is_bad(tasks[i])]
    words = [f"{done} of {len(tasks)} tasks completed"]
    words += [f"task {index} {_end(tasks[index])}" for index in bad[:NAMED]]
    if len(bad) > NAMED:
        words.append(f"and {len(bad) - NAMED} more")
    return ", ".join(words)


def _is_bad(progress: Progress) -> bool:
    return progress.state is not JobState.COMPLETED


def _end(progress: Progress) -> str:
    detail = "" if progress.exit_code is None else f" (exit code {progress.exit_code})"
    if progress.bad_nodes:
        detail = f" ({', '.join(progress.bad_nodes)})"
    return f"{progress.state.value}{detail}"
