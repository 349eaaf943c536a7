"""Current states of jobs, from their records and schedulers, and requests to end jobs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from qsgd_hpc.errors import LaunchError, UsageError
from qsgd_hpc.jobs import registry
from qsgd_hpc.jobs.events import with_own_record
from qsgd_hpc.jobs.model import Job, JobState, Progress
from qsgd_hpc.jobs.schedulers import scheduler

__all__ = [
    "cancel",
    "chain",
    "continued_by",
    "damaged",
    "get",
    "list_jobs",
    "load_all",
    "output",
    "refreshed",
    "stop",
]


def get(job_id: str) -> Job:
    """Return a job with its current state.

    Raises:
        UsageError: the job does not exist.
    """
    return refreshed([registry.load(job_id)])[0]


def list_jobs() -> list[Job]:
    """Return all jobs with their current states, oldest first, by one query per scheduler."""
    return refreshed(load_all())


def load_all() -> list[Job]:
    """Return the recorded jobs, oldest first, without unreadable ones."""
    jobs = []
    for job_id in registry.ids():
        try:
            jobs.append(registry.load(job_id))
        except UsageError:
            continue  # removed since the folder was read, or damaged
    return sorted(jobs, key=lambda job: (job.submitted_at, registry.number(job.id)))


def damaged(shown: Iterable[Job]) -> list[str]:
    """Return the ids of jobs that are not shown because their records cannot be read."""
    known = {job.id for job in shown}
    found = []
    for job_id in (each for each in registry.ids() if each not in known):
        try:
            registry.load(job_id)
        except UsageError:
            found.append(job_id)
    left = set(registry.ids()) if found else set()  # another command may have removed some
    return [job_id for job_id in found if job_id in left]


def refreshed(jobs: Sequence[Job]) -> list[Job]:
    """Query each scheduler once about its jobs that have not ended, and record changes."""
    news: dict[str, Progress] = {}
    # Including LOST jobs: if only a job's state file is damaged, its scheduler knows the state.
    open_jobs = [job for job in jobs if not job.state.final]
    for name in {job.scheduler for job in open_jobs}:
        news |= scheduler(name).refresh([job for job in open_jobs if job.scheduler == name])
    return [_recorded(job, news.get(job.id, job.progress)) for job in jobs]


def _recorded(job: Job, progress: Progress) -> Job:
    """Record changes. An end is final: an older answer that arrives later does not undo it.

    LOST is the result of one query; it is not recorded, so that a later answer can correct it. A
    query without an answer changes nothing.
    """
    if job.state.final:
        return job
    if progress.silence:
        return dataclasses.replace(job, progress=progress)
    progress = with_own_record(job, progress)
    if progress == job.progress and job.scheduler != "local":
        return registry.confirm(job)
    new = progress != job.progress and progress.state is not JobState.LOST
    if not new or progress.scheduler_id is None:
        return dataclasses.replace(job, progress=progress)
    newest = registry.load(job.id)
    if newest.state.final:
        return newest
    with contextlib.suppress(OSError):  # if the disk is full, the next query records it
        return registry.save(job, progress)
    return dataclasses.replace(job, progress=progress)


def chain(job_id: str) -> list[Job]:
    """Return the parts of a chain that run after this job, in their order."""
    following = {}
    for job in load_all():
        if job.previous is not None:
            following[job.previous] = job
    found = []
    while after := following.get(job_id):
        found.append(after)
        job_id = after.id
    return found


def continued_by(job: Job) -> Job | None:
    """Return the job that continues the training of this one, unless it has also failed."""
    line, after = {job.id}, []
    for other in load_all():  # a job is older than the one that continues it
        if line & {other.previous, other.resumes}:
            line.add(other.id)
            after.append(other)
    failed = (JobState.FAILED, JobState.CANCELLED, JobState.LOST)
    return next((other for other in refreshed(after) if other.state not in failed), None)


def cancel(job_id: str) -> Job:
    """Cancel a job, all its processes, and the waiting parts of its chain.

    A job that has ended is not changed.

    Raises:
        UsageError: the job does not exist.
        LaunchError: the scheduler refused, or it may still accept the job.
    """
    job = get(job_id)
    for part in reversed(chain(job_id)):
        if not part.state.final:
            scheduler(part.scheduler).cancel(part)
    if not job.state.final:
        scheduler(job.scheduler).cancel(job)
    job = get(job_id)
    if not job.state.ended and job.progress.scheduler_id is None and job.scheduler != "local":
        raise LaunchError(
            "its scheduler has not confirmed it and does not list it, but may still accept it."
        )
    return job


def stop(job_id: str) -> Job:
    """Ask a job to stop at its next checkpoint: ``should_stop()`` becomes true in its script.

    Tasks of an array that have not started end as STOPPED without running the script, unless the
    job is requeued automatically.

    Raises:
        UsageError: the job does not exist or is not running.
    """
    job = get(job_id)
    if job.state is not JobState.RUNNING:
        raise UsageError(
            f"{job.id} is {job.state.value}; only a running job can stop at a checkpoint. To "
            f"end a waiting job, use `qsgd-hpc cancel {job.id}`."
        )
    tasks = map(job.task_directory, range(len(job.request.tasks)))
    for folder in (job.directory, *tasks):  # the array first: no other task starts
        if folder.is_dir():
            registry.write_file(folder / "stop", "")
    return job


def output(job_id: str) -> Path:
    """Return the file with the output of all ranks; it does not exist before the job starts."""
    return registry.load(job_id).log_path
