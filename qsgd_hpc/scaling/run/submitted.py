"""Links between a job and its folder that survive interruptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from qsgd_hpc import jobs
from qsgd_hpc.errors import QsgdError
from qsgd_hpc.scaling.store.provenance import of_job

__all__ = ["Names", "Noted", "job_of", "never_taken", "submit_noted"]


class Noted(Protocol):
    """The folder of a submission."""

    def note(self) -> dict[str, Any] | None:
        """Return the note on the job; None if there is none."""

    def write_note(self, body: Mapping[str, Any]) -> None:
        """Store the note."""


Names = Callable[[jobs.JobRequest], bool]


def submit_noted(
    asked: jobs.JobRequest,
    facts: Mapping[str, Any],
    place: Noted,
    names: Names,
    follow: Callable[[jobs.Job], None],
) -> jobs.Job:
    """Submit a job, record it in its folder, and call `follow`, also after an interrupt.

    Args:
        asked: the requested job.
        facts: further values to record.
        place: its folder.
        names: returns whether a request is the one of this job.
        follow: is called with the job if it was submitted, also before an interrupt is raised.
    """
    try:
        job = jobs.submit(asked)
        place.write_note(of_job(facts, asked, job))
    except BaseException:
        submitted = job_of(place, names)  # an interrupt can arrive during the submission
        if submitted is not None:
            follow(submitted)
        raise
    follow(job)
    return job


def job_of(place: Noted, names: Names) -> jobs.Job | None:
    """Return the job that was submitted for a folder, if known."""
    note = place.note()
    if note is not None:
        try:
            return jobs.get(str(note["job_id"]))
        except (QsgdError, KeyError):
            return None  # the job's registry was cleaned; the point is measured again
    # After a kill between submitting and writing the note, the job is found by its request.
    return next((j for j in jobs.list_jobs() if names(j.request)), None)


def never_taken(job: jobs.Job) -> bool:
    """Return whether no scheduler accepted a job, because its submission was interrupted."""
    progress = job.progress  # local jobs have no scheduler_id
    began = progress.scheduler_id is not None or progress.started_at is not None
    return progress.state is jobs.JobState.LOST and not began
