"""The local job that runs this process: it must not wait for jobs that wait for its end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.current import get
from qsgd_hpc.jobs.model import Job, JobState
from qsgd_hpc.jobs.records import registry
from qsgd_hpc.jobs.schedulers.local import other_host
from qsgd_hpc.jobs.words import listing

__all__ = ["own_job", "refuse_standstill", "why_never_ends"]


def own_job() -> Job | None:
    """Return the local job of this QSGD_HOME that runs this process, or None."""
    folder = env.get("QSGD_JOB_DIR")
    if not folder:
        return None
    jobs_dir = registry.jobs_dir().resolve()
    for path in (Path(folder).resolve(), Path(folder).resolve().parent):  # or a task's folder
        if path.parent == jobs_dir:
            try:
                job = get(path.name)
            except UsageError:
                return None
            here = job.scheduler == "local" and other_host(job) is None
            return job if here and not job.state.ended else None
    return None


def refuse_standstill(jobs: Iterable[Job]) -> None:
    """Refuse to wait, in a local job, for this job itself or for jobs queued behind it.

    Args:
        jobs: with their current states.
    Raises:
        UsageError: such jobs, with the remedy.
    """
    local = [j for j in jobs if j.scheduler == "local" and not j.state.ended]
    if not local or (own := own_job()) is None:
        return
    if any(job.id == own.id for job in local):
        raise UsageError(
            f"{own.id} is the job that runs this command: it would wait for its own end. Leave "
            f"{own.id} out, or run this command outside of the job."
        )
    queued = [j.id for j in local if j.state is JobState.QUEUED and other_host(j) is None]
    if queued:
        raise UsageError(
            f"waiting for {listing(queued, 'and')} here would never end: {_reason(own)}. Let "
            f"{own.id} end without waiting, and submit what comes after as another job: "
            f"`qsgd-hpc submit --after {queued[-1]} SCRIPT`."
        )


def why_never_ends() -> str | None:
    """Return why waiting here for a new local job would never end, or None."""
    return None if (own := own_job()) is None else _reason(own)


def _reason(own: Job) -> str:
    return (
        "jobs of this machine run one after another, and this command is part of "
        f"{own.id}, which would have to end first"
    )
