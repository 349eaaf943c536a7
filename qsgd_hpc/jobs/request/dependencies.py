"""Dependencies of a job: ``--after ID``, ``--after any:ID``, and the parts of a chain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from qsgd_hpc.errors import LaunchError, UsageError
from qsgd_hpc.jobs.current import refreshed
from qsgd_hpc.jobs.model import Job, JobState
from qsgd_hpc.jobs.records import registry
from qsgd_hpc.jobs.schedulers.command import Dependency
from qsgd_hpc.jobs.schedulers.local import other_host
from qsgd_hpc.jobs.sites.profile import Site

__all__ = ["after_faults", "dependencies", "unmet"]


def _split(word: str) -> tuple[Literal["ok", "any"], str]:
    """Return (kind, job id): ``any`` if that job only has to end, ``ok`` if it must complete."""
    kind, _, job_id = word.rpartition(":")
    return ("any", job_id) if kind == "any" else ("ok", word)


def after_faults(after: Iterable[str], site: Site, *, ask: bool) -> list[str]:
    """Return the faults of a new job's dependencies.

    ``ask``: query their scheduler first, and record their states: they may have ended since.
    """
    faults, found = [], {}
    for word in after:
        try:
            found[word] = registry.load(_split(word)[1])
        except UsageError as error:
            faults.append(f"--after {word}: {error}")
    if ask:
        found = dict(zip(found, refreshed(list(found.values())), strict=True))
    for word, job in found.items():
        kind, job_id = _split(word)
        if job.scheduler != site.scheduler or job.site != site.name:
            faults.append(
                f"--after {word}: that job is on {job.site}, this one would be on {site.name}. "
                f"Jobs can only wait for jobs of the same site: use --site {job.site}."
            )
        elif (host := other_host(job)) and not job.state.ended:
            faults.append(
                f"--after {word}: that job runs on host {host}, and jobs of a machine without a "
                "scheduler wait for jobs of the same host only. Submit this one there, or after it "
                "has ended."
            )
        elif kind == "ok" and job.state.ended and job.state is not JobState.COMPLETED:
            faults.append(
                f"--after {word}: that job is {job.state.value}, so this one would never start. "
                f"Use --after any:{job_id}, or resubmit it with `qsgd-hpc resubmit {job_id}`."
            )
    return faults


def dependencies(job: Job) -> list[Dependency]:
    """Return the dependencies for the scheduler, without jobs that have ended.

    Raises:
        LaunchError: the scheduler has not confirmed such a job, so that none can wait for it.
    """
    found = []
    for word in job.request.after:
        kind, job_id = _split(word)
        other = registry.load(job_id)
        if other.state.ended or other.scheduler == "local":
            continue
        if other.progress.scheduler_id is None:
            raise LaunchError(
                f"nothing was submitted: it would wait for {job_id}, which its scheduler has not "
                f"confirmed. Try again when `qsgd-hpc status {job_id}` shows a scheduler id."
            )
        found.append(Dependency(kind, other.progress.scheduler_id))
    return found


def unmet(job: Job) -> str | None:
    """Return the id of a dependency of a local job that did not complete, or None."""
    for word in job.request.after:
        kind, job_id = _split(word)
        try:
            state = registry.load(job_id).state
        except UsageError:
            continue
        if kind == "ok" and state is not JobState.COMPLETED:
            return job_id
    return None
