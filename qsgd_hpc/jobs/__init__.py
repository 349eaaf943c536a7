"""Batch jobs: define, render, submit and follow them. This is the public API.

::

    from qsgd_hpc import jobs
    job = jobs.submit(jobs.JobRequest(Path("train.py"), nodes=2, walltime_min=30))
    jobs.wait([job.id])
    print(jobs.output(job.id).read_text())
"""

from qsgd_hpc.jobs.current import cancel, chain, get, list_jobs, output, stop
from qsgd_hpc.jobs.model import Job, JobRequest, JobState, Progress
from qsgd_hpc.jobs.submission import render, resubmit, submit, submit_all
from qsgd_hpc.jobs.waiting import wait

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
