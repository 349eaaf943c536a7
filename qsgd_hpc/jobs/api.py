"""The Python API to submit and follow jobs, which the command line uses, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qsgd_hpc.errors import LaunchError, UsageError
from qsgd_hpc.jobs import submission
from qsgd_hpc.jobs.current import chain, continued_by, get, list_jobs
from qsgd_hpc.jobs.model import Job, JobRequest, JobState
from qsgd_hpc.jobs.processes import alive
from qsgd_hpc.jobs.records import registry
from qsgd_hpc.jobs.request.prepare import default_stop_before, prepare
from qsgd_hpc.jobs.schedulers import scheduler
from qsgd_hpc.jobs.submission import render
from qsgd_hpc.jobs.waiting import Patience, wait
from qsgd_hpc.launch.schedulers import SCHEDULERS

__all__ = [
    "Patience",
    "cancel",
    "chain",
    "continued_by",
    "get",
    "list_jobs",
    "output",
    "prepare",
    "render",
    "resubmit",
    "stop",
    "submit",
    "submit_all",
    "wait",
]


def submit(request: JobRequest) -> Job:
    """Check, render, register and submit a job, or all parts of a chain; return the first.

    Raises:
        UsageError: all faults of the request, one per line.
        LaunchError: the scheduler refused the job; nothing stays registered.
        KeyboardInterrupt: Ctrl-C during the submission, which is completed first.
    """
    return submission.submit(request)[0]


def submit_all(
    request: JobRequest,
    tell: Callable[[str], object] = lambda _note: None,
    known: Callable[[Job], object] = lambda _job: None,
) -> list[Job]:
    """Like :func:`submit`, but return all parts of a chain, in the order of execution.

    Args:
        request: the job.
        tell: called with each note about the site.
        known: called with each job that another submission with the same key has created.
    Raises:
        UsageError, LaunchError, KeyboardInterrupt: as :func:`submit`.
    """
    return submission.submit(request, tell, known)


def resubmit(job_id: str, changes: Mapping[str, Any] | None = None, *, force: bool = False) -> Job:
    """Submit a job again after it has ended; its script resumes from the last checkpoint.

    Nodes whose failure ended the job are excluded if the scheduler supports it.

    Args:
        job_id: a job that has ended.
        changes: changed fields of :class:`JobRequest`, such as ``walltime_min``.
        force: submit even if the job is complete, its script still runs, or another one
            continues it.

    Raises:
        UsageError: there is no such job, there is nothing to continue, or the changed request is
            faulty.
        LaunchError: the scheduler refused the job.
    """
    job = get(job_id)
    if fault := None if force and job.state.ended else _resubmit_fault(job):
        raise UsageError(fault)
    fresh: dict[str, Any] = {"key": None, "after": (), "chain": 1}
    if SCHEDULERS[job.scheduler].excludes:
        fresh["exclude"] = tuple(dict.fromkeys((*job.request.exclude, *job.progress.bad_nodes)))
    before, walltime_min = job.request.stop_before_min, job.request.walltime_min
    if walltime_min is not None and before == default_stop_before(walltime_min):
        fresh["stop_before_min"] = None  # not chosen by the user: that of the new walltime
    return submission.submit_again(
        job, dataclasses.replace(job.request, **{**fresh, **(changes or {})})
    )


def _resubmit_fault(job: Job) -> str | None:
    """Return why a job should not be submitted again, with the remedy, or None."""
    if not job.state.ended:
        return (
            f"{job.id} is {job.state.value}, so there is nothing to resubmit yet. Cancel it first "
            f"(`qsgd-hpc cancel {job.id}`), or wait for its end."
        )
    if job.state is JobState.COMPLETED:
        return f"{job.id} is COMPLETED, so nothing is left to do. Use --force to run it again."
    if job.state is JobState.LOST and alive(job.progress.pid, job.progress.identity):
        return (
            f"the script of {job.id} still runs; two trainings would write the same checkpoint. "
            f"End it with `qsgd-hpc cancel {job.id}`, or use --force."
        )
    if other := continued_by(job):
        return (
            f"{other.id} ({other.state.value}) continues {job.id}; two trainings would write "
            f"the same checkpoint. See `qsgd-hpc status {other.id}`, or use --force."
        )
    return None


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
    tasks = [job.directory / f"task-{n}" for n in range(len(job.request.tasks))]
    for folder in (job.directory, *tasks):  # the array first: no other task starts
        if folder.is_dir():
            registry.write_file(folder / "stop", "")
    return job


def output(job_id: str) -> Path:
    """Return the file with the output of all ranks; it does not exist before the job starts."""
    return registry.load(job_id).log_path
