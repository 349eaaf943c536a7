"""Submit jobs and follow them: the Python API behind the command line."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from qsgd_hpc import env
from qsgd_hpc.errors import LaunchError, UsageError
from qsgd_hpc.jobs import registry, sites
from qsgd_hpc.jobs.model import Job, JobRequest, JobState, Progress
from qsgd_hpc.jobs.profile import Site
from qsgd_hpc.jobs.render import Tools, render_script
from qsgd_hpc.jobs.schedulers import scheduler
from qsgd_hpc.jobs.schedulers.command import UnconfirmedError
from qsgd_hpc.jobs.validate import Facts, fill, request_faults, site_faults

__all__ = ["cancel", "get", "list_jobs", "output", "poll_s", "render", "submit", "wait"]

LOCAL_POLL_S, BATCH_POLL_S = 0.3, 15.0


def submit(request: JobRequest) -> Job:
    """Check, render, register and start a job.

    Raises:
        UsageError: everything that is wrong with the request, one fault a line.
        LaunchError: the scheduler refused the job; nothing stays registered.
    """
    filled, site = _prepare(request, dry_run=False)
    script = render_script(filled, site, Tools.here())
    job = registry.create(filled, site.scheduler, script)
    handler = scheduler(site.scheduler)
    try:
        progress = handler.submit(job)
    except LaunchError as error:
        if not isinstance(error, UnconfirmedError):
            shutil.rmtree(job.directory, ignore_errors=True)
        raise
    # A local job's state belongs to its runner from here on.
    if progress.scheduler_id is None:
        return dataclasses.replace(job, progress=progress)
    return registry.save(job, progress)


def render(request: JobRequest) -> str:
    """Return the job script that :func:`submit` would submit; needs no scheduler here.

    Raises:
        UsageError: everything that is wrong with the request, one fault a line.
    """
    filled, site = _prepare(request, dry_run=True)
    return render_script(filled, site, Tools.here())


def _prepare(request: JobRequest, *, dry_run: bool) -> tuple[JobRequest, Site]:
    """Return the filled request and its site, or raise all faults together."""
    workdir = (request.workdir or Path.cwd()).absolute()
    request = dataclasses.replace(request, workdir=workdir)
    faults = []
    site = None
    try:
        site = sites.choose(request.site, sites.find_host())
    except UsageError as error:
        faults.append(str(error))
    facts = _look(request, workdir, site, dry_run)
    filled = request
    if site is not None:
        filled = fill(request, site, {"account": env.get("QSGD_ACCOUNT")})
        faults += site_faults(filled, site, facts)
    faults = request_faults(filled, facts) + faults
    if faults or site is None:
        raise UsageError("\n".join(faults))
    return filled, site


def _look(request: JobRequest, workdir: Path, site: Site | None, dry_run: bool) -> Facts:
    """See what the check needs to know about this machine."""
    script = workdir / request.script
    near: tuple[str, ...] = ()
    fault = _script_fault(script, request)
    if fault and script.parent.is_dir():
        near = tuple(sorted(p.name for p in script.parent.iterdir() if p.is_file())[:500])
    command = sites.SUBMIT_COMMANDS.get(site.scheduler) if site else None
    missing = command if command and not dry_run and not shutil.which(command) else None
    return Facts(fault, near if fault and "no script" in fault else (), missing)


def _script_fault(script: Path, request: JobRequest) -> str | None:
    try:
        if not script.exists():
            return f"there is no script '{script}'."
        if script.is_dir():
            return f"'{script}' is a folder. Name the script in it."
    except (OSError, ValueError) as error:
        return f"cannot look at script {str(script)!r}: {error}"
    if not os.access(script, os.R_OK):
        return f"script '{script}' cannot be read. Use `chmod u+r` on it."
    if script.suffix != ".py" and not request.python and not os.access(script, os.X_OK):
        return (
            f"'{script}' is neither a .py file nor executable. Use `chmod +x` on it, or --python "
            "to name its interpreter."
        )
    return None


def get(job_id: str) -> Job:
    """Return a job as it is now.

    Raises:
        UsageError: there is no such job.
    """
    return _refreshed([registry.load(job_id)])[0]


def list_jobs() -> list[Job]:
    """Return all jobs as they are now, oldest first, with one question to each scheduler."""
    return _refreshed(_load_all(registry.ids()))


def _load_all(ids: Iterable[str]) -> list[Job]:
    jobs = []
    for job_id in ids:
        try:
            jobs.append(registry.load(job_id))
        except UsageError:
            continue  # removed since the folder was read, or damaged
    return sorted(jobs, key=lambda job: (job.submitted_at, registry.number(job.id)))


def _refreshed(jobs: Sequence[Job]) -> list[Job]:
    """Ask each scheduler once about its jobs that have not ended, and record what is new."""
    news: dict[str, Progress] = {}
    open_jobs = [job for job in jobs if not job.state.ended]
    for name in {job.scheduler for job in open_jobs}:
        news |= scheduler(name).refresh([job for job in open_jobs if job.scheduler == name])
    return [_recorded(job, news.get(job.id, job.progress)) for job in jobs]


def _recorded(job: Job, progress: Progress) -> Job:
    # LOST is what one question showed; it is not recorded, so that a later answer may correct it.
    new = progress != job.progress and progress.state is not JobState.LOST
    if new and progress.scheduler_id is not None:
        return registry.save(job, progress)
    return dataclasses.replace(job, progress=progress)


def wait(
    ids: Iterable[str],
    timeout_s: float | None = None,
    on_change: Callable[[Job], None] | None = None,
) -> list[Job]:
    """Return the jobs when all have ended, or as they are after ``timeout_s`` seconds.

    ``on_change`` is called with each job at first, and whenever its state is another one.
    """
    wanted = list(ids)
    seen: Mapping[str, JobState] = {}
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        jobs = _refreshed([registry.load(job_id) for job_id in wanted])
        for job in jobs:
            if on_change and seen.get(job.id) is not job.state:
                on_change(job)
        seen = {job.id: job.state for job in jobs}
        pending = [job for job in jobs if not job.state.ended]
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        if not pending or (left_s is not None and left_s <= 0):
            return jobs
        pause_s = min(poll_s(job) for job in pending)
        time.sleep(pause_s if left_s is None else min(pause_s, left_s))


def poll_s(job: Job) -> float:
    """Return the seconds between two questions about a job that spare its scheduler."""
    return LOCAL_POLL_S if job.scheduler == "local" else BATCH_POLL_S


def cancel(job_id: str) -> Job:
    """End a job and everything it has started; one that has ended stays as it is.

    Raises:
        UsageError: there is no such job.
        LaunchError: the scheduler refused.
    """
    job = get(job_id)
    if not job.state.ended or job.state is JobState.LOST:
        scheduler(job.scheduler).cancel(job)
    return get(job_id)


def output(job_id: str) -> Path:
    """Return the file with the merged output of all ranks; it is not there before the start."""
    return registry.load(job_id).log_path
