"""A submitted job of a study: its provenance, and its folder, which survives interruptions."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qsgd_hpc import __version__, jobs
from qsgd_hpc.errors import QsgdError
from qsgd_hpc.scaling.define.study import Study
from qsgd_hpc.scaling.store import JobFolder, StudyFolder

__all__ = [
    "Names",
    "StudyJob",
    "job_of",
    "never_taken",
    "of_job",
    "study_request",
    "submission",
    "submit_noted",
]

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


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return {"commit", "dirty"} of the repository that contains `folder`; None if there is none.

    Dirty means that tracked files differ from the commit; untracked files do not count.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "-uno"))}


def submission(script: Path) -> dict[str, Any]:
    """Return the provenance that is known when a job is submitted.

    Facts that only the job can determine (host, processor, frameworks, MPI library) are in every
    line that the script records.
    """
    return {
        "git": git_state(script.parent),
        "script_sha256": hashlib.sha256(script.read_bytes()).hexdigest(),
        "submitted_from": socket.gethostname(),
        "modules": [m for m in os.environ.get("LOADEDMODULES", "").split(":") if m],
        "qsgd_hpc": __version__,
        "python": sys.version.split()[0],
    }


def of_job(facts: Mapping[str, Any], asked: jobs.JobRequest, job: jobs.Job) -> dict[str, Any]:
    """Return the provenance of a submitted job: these facts, its request and its id."""
    return {
        **facts,
        "job": {
            "id": job.id,
            "site": job.site,
            "scheduler": job.scheduler,
            "submitted_at": job.submitted_at,
        },
        "command": [str(asked.script), *asked.script_args],
        "env": dict(asked.env),
        "job_id": job.id,
    }


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
