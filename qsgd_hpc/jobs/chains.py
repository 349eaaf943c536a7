"""Handling of chains that cannot be submitted as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs import keys, registry
from qsgd_hpc.jobs.current import chain, get
from qsgd_hpc.jobs.events import read_events
from qsgd_hpc.jobs.model import Job, JobState
from qsgd_hpc.jobs.schedulers import scheduler

__all__ = ["forget", "taken_back"]


def taken_back(jobs: Sequence[Job]) -> list[str]:
    """Cancel the parts of a chain that could not be submitted completely; describe each.

    A part that never ran is removed; one that has started, or may start, keeps its record.
    """
    gone, said = [], []
    # Including an unconfirmed part. The last first, because the end of one lets the next start.
    for job in reversed([*jobs, *chain(jobs[-1].id)] if jobs else []):
        try:
            scheduler(job.scheduler).cancel(job)
            now = get(job.id)
        except LaunchError as error:
            said.append(f"{job.id} is not cancelled: {error} Try `qsgd-hpc cancel {job.id}`.")
            continue
        if _never_ran(now):
            forget(now)
            gone.append(job.id)
        elif now.state.final:
            said.append(f"{job.id} had started before and is {now.state.value} now.")
        elif now.progress.scheduler_id is None and now.scheduler != "local":
            said.append(f"If {job.id} appears in `qsgd-hpc list`, use `qsgd-hpc cancel {job.id}`.")
        else:
            said.append(f"{job.id} was asked to end: see `qsgd-hpc status {job.id}`.")
    if gone:
        said.append(f"Cancelled again: {', '.join(reversed(gone))}.")
    return said[::-1]


def _never_ran(job: Job) -> bool:
    """Return whether the job was cancelled before its script started."""
    started = job.progress.started_at or read_events(job.directory)
    return job.state is JobState.CANCELLED and not started


def forget(job: Job) -> None:
    """Remove the record and the key of a job that never ran."""
    registry.remove(job)
    if job.request.key:
        keys.release(job.request.key)
