"""A submitted job of a study, and the link to its folder that survives interruptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qsgd_hpc import jobs
from qsgd_hpc.errors import QsgdError
from qsgd_hpc.scaling.define.study import Study
from qsgd_hpc.scaling.store.folder import JobFolder, StudyFolder
from qsgd_hpc.scaling.store.provenance import of_job

__all__ = ["Names", "StudyJob", "job_of", "never_taken", "study_request", "submit_noted"]

# After a restart, a scheduler may not list a job for some time.
LOST_LOOKS = 4

Names = Callable[[jobs.JobRequest], bool]


@dataclass
class StudyJob:
    """A job of a study that is queued or running."""

    folder: StudyFolder
    study: Study
    job: jobs.Job
    lost: int = field(default=0, kw_only=True)

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return self.job.request.nodes

    def over(self) -> bool:
        """Return whether the job has ended; LOST counts only after several queries."""
        self.lost = self.lost + 1 if self.job.state is jobs.JobState.LOST else 0
        return self.job.state.final or self.lost >= LOST_LOOKS


def study_request(study: Study, **own: Any) -> jobs.JobRequest:
    """Return the request of a job with the study's settings and its own."""
    return jobs.JobRequest(
        ranks_per_node=study.ranks_per_node,
        walltime_min=study.walltime_min,
        queue=study.queue,
        account=study.account,
        filesystems=study.filesystems,
        python=study.python,
        site=study.site,
        workdir=study.workdir,
        **own,
    )


def submit_noted(
    asked: jobs.JobRequest,
    facts: Mapping[str, Any],
    place: JobFolder,
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


def job_of(place: JobFolder, names: Names) -> jobs.Job | None:
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
