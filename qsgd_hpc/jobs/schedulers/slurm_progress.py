"""Progress of a job from the answers of squeue (``live``) and sacct (``past``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from qsgd_hpc.jobs.model import Job, JobState, Progress
from qsgd_hpc.jobs.records.events import task_progress
from qsgd_hpc.jobs.schedulers.arrays import aggregate
from qsgd_hpc.jobs.schedulers.slurm_answers import Squeue
from qsgd_hpc.jobs.schedulers.slurm_clusters import cluster_of, number_of, within

__all__ = ["has_waiting_tasks", "ids_of", "is_omitted", "needs_accounting", "progress_of"]


def ids_of(job: Job, key: str) -> list[str]:
    """Return the ids under which Slurm lists a job: its own, or those of its tasks."""
    if not job.request.array:
        return [key]
    number, cluster = number_of(key), cluster_of(key)
    return [within(f"{number}_{index}", cluster) for index in range(len(job.request.tasks))]


def needs_accounting(job: Job, key: str, live: Squeue) -> bool:
    """Return whether accounting is needed for the end of the job, or of one of its tasks."""
    keys = [one for one in ids_of(job, key) if one not in live.unclear]
    return any(one not in live or live[one].state.ended for one in keys)


def is_omitted(job: Job, key: str, live: Squeue, past: Mapping[str, Progress]) -> bool:
    """Return whether both answers omit the job, or one of its tasks."""
    known = {*live, *live.unclear, *past}
    return not has_waiting_tasks(key, known) and any(one not in known for one in ids_of(job, key))


def has_waiting_tasks(key: str, known: Iterable[str]) -> bool:
    """Return whether tasks of an array are listed together, as those that have not started are."""
    head, cluster = f"{number_of(key)}_[", cluster_of(key)
    return any(one.startswith(head) and cluster_of(one) == cluster for one in known)


def progress_of(
    job: Job, key: str, live: Squeue, past: Mapping[str, Progress] | None
) -> Progress | None:
    """Return the progress of a job from both answers; None: unknown, or accounting is down."""
    return _array(job, key, live, past) if job.request.array else _one(key, live, past)


def _one(
    key: str, live: Mapping[str, Progress], past: Mapping[str, Progress] | None
) -> Progress | None:
    """Return the progress of a plain job, or of one task.

    squeue is used for active jobs, sacct for ended ones. If sacct lags behind, the job remains
    active for a moment, instead of ending permanently without an exit code.
    """
    now, then = live.get(key), (past or {}).get(key)
    if now is None or (now.state.ended and then is not None):
        return then
    if now.state is JobState.COMPLETED:
        return replace(now, exit_code=0)
    if now.state.ended and past is None:
        return None  # wait for its exit code
    return now


def _array(
    job: Job, key: str, live: Squeue, past: Mapping[str, Progress] | None
) -> Progress | None:
    """Return the progress of an array from its tasks; None if it is unknown."""
    pending = has_waiting_tasks(key, {*live, *(past or {})})
    tasks: dict[int, Progress] = {}
    for index, one in enumerate(ids_of(job, key)):
        known = _one(one, live, past)
        if known is None and past is None:
            return None
        if known is None and not pending:
            own = task_progress(job, index)  # Slurm without accounting soon deletes ended tasks
            lost = Progress(JobState.LOST, why="Slurm no longer knows this task")
            known = own if own.state.ended else lost
        tasks[index] = known or Progress()
    if all(progress.state is JobState.LOST for progress in tasks.values()):
        return None
    return aggregate(tasks)
