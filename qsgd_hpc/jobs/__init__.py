"""Batch jobs: define, render, submit and follow them. This is the public API.

::

    from qsgd_hpc import jobs
    job = jobs.submit(jobs.JobRequest(Path("train.py"), nodes=2, walltime_min=30))
    jobs.wait([job.id])
    print(jobs.output(job.id).read_text())
"""

from qsgd_hpc.jobs.api import (
    cancel,
    chain,
    get,
    list_jobs,
    output,
    render,
    resubmit,
    stop,
    submit,
    submit_all,
    wait,
)
from qsgd_hpc.jobs.model import Job, JobRequest, JobState, Progress

__all__ = [
    "Job",
    "JobRequest",
    "JobState",
    "Progress",
    "cancel",
    "chain",
    "get",
    "list_jobs",
    "output",
    "render",
    "resubmit",
    "stop",
    "submit",
    "submit_all",
    "wait",
]
