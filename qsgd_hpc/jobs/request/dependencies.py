"""Dependencies of a job: ``--after ID``, ``--after any:ID``, and the parts of a chain."""

from __future__ import annotations

from collections.abc import Iterable

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.model import Job, JobState
from qsgd_hpc.jobs.records import registry
from qsgd_hpc.jobs.schedulers.command import Dependency
from qsgd_hpc.jobs.sites.profile import Site

__all__ = ["after_faults", "dependencies", "split", "unmet"]


def split(word: str) -> tuple[str, str]:
    """Return (kind, job id): ``any`` if that job only has to end, ``ok`` if it must complete."""
    kind, _, job_id = word.rpartition(":")
    return ("any", job_id) if kind == "any" else ("ok", word)


def after_faults(after: Iterable[str], site: Site) -> list[str]:
    """Return the faults of a new job's dependencies."""
    faults = []
    for word in after:
        kind, job_id = split(word)
        try:
            job = registry.load(job_id)
        except UsageError as error:
            faults.append(f"--after {word}: {error}")
            continue
        if job.scheduler != site.scheduler or job.site != site.name:
            faults.append(
                f"--after {word}: that job is on {job.site}, this one would be on {site.name}. "
                f"Jobs can only wait for jobs of the same site: use --site {job.site}."
            )
        elif kind == "ok" and job.state.ended and job.state is not JobState.COMPLETED:
            faults.append(
                f"--after {word}: that job is {job.state.value}, so this one would never start. "
                f"Use --after any:{job_id}, or resubmit it with `qsgd-hpc resubmit {job_id}`."
            )
    return faults


def dependencies(job: Job) -> list[Dependency]:
    """Return the dependencies for the scheduler, without jobs that have ended."""
    found = []
    for word in job.request.after:
        kind, job_id = split(word)
        other = registry.load(job_id)
        if not other.state.ended and other.progress.scheduler_id is not None:
            found.append(Dependency("any" if kind == "any" else "ok", other.progress.scheduler_id))
    return found


def unmet(job: Job) -> str | None:
    """Return the id of a dependency of a local job that did not complete, or None."""
    for word in job.request.after:
        kind, job_id = split(word)
        try:
            state = registry.load(job_id).state
        except UsageError:
            continue
        if kind == "ok" and state is not JobState.COMPLETED:
            return job_id
    return None
