"""Submission of requests: check all, register, submit, in this order."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from qsgd_hpc import env
from qsgd_hpc._notices import tell
from qsgd_hpc.errors import LaunchError, UsageError
from qsgd_hpc.jobs import keys, mpi_fit, registry, sites
from qsgd_hpc.jobs.chains import forget, taken_back
from qsgd_hpc.jobs.dependencies import after_faults, dependencies
from qsgd_hpc.jobs.interrupts import interrupts_deferred
from qsgd_hpc.jobs.model import Job, JobRequest
from qsgd_hpc.jobs.profile import Site
from qsgd_hpc.jobs.render import Place, Tools, render_script
from qsgd_hpc.jobs.request_check import choice_faults, complete, home_faults
from qsgd_hpc.jobs.schedulers import scheduler
from qsgd_hpc.jobs.schedulers.command import UnconfirmedError, mark
from qsgd_hpc.jobs.schedulers.news import SETTLE_S
from qsgd_hpc.jobs.schedulers.slurm_clusters import with_choice
from qsgd_hpc.jobs.validate import Facts, fill, request_faults, site_faults, site_notes
from qsgd_hpc.launch.cluster import parse as parse_network
from qsgd_hpc.launch.cluster.keeper import trial
from qsgd_hpc.launch.schedulers import SCHEDULERS

__all__ = ["prepare", "render", "submit", "submit_again"]

ASK_AGAIN_S = 2.0


def submit(request: JobRequest, tell: Callable[[str], object] = lambda _note: None) -> list[Job]:
    """Submit a request; several jobs if it is a chain, in the order of execution.

    ``tell`` is called with each note about the site.

    Raises:
        UsageError: all faults of the request, one per line.
        LaunchError: the scheduler refused a job; earlier parts are cancelled, and
            the message of a failure says so.
        KeyboardInterrupt: Ctrl-C meanwhile; the jobs are still submitted and registered.
    """
    filled, site = prepare(request, dry_run=False)
    for note in site_notes(filled, site):
        tell(note)
    start_s = time.time()
    with interrupts_deferred():
        jobs: list[Job] = []
        for part in range(filled.chain):
            try:
                jobs.append(_submit_part(filled, site, part, jobs[-1] if jobs else None))
            except (LaunchError, UsageError) as error:
                said = taken_back([job for job in jobs if job.submitted_at >= start_s])
                if not said:
                    raise
                raise type(error)("\n".join([str(error), *said])) from None
        return jobs


def _submit_part(request: JobRequest, site: Site, part: int, previous: Job | None) -> Job:
    """Submit one part of a chain (usually the only one) that runs after ``previous``."""
    if previous is not None:
        request = dataclasses.replace(request, after=(f"any:{previous.id}",))
    if request.key and part:
        request = dataclasses.replace(request, key=f"{request.key}\n{part}")
    return _submit_once(request, site, previous=previous)


def submit_again(job: Job, request: JobRequest) -> Job:
    """Submit the request of an ended job again, as its continuation."""
    filled, site = prepare(request, dry_run=False)
    with interrupts_deferred():
        return _submit_once(filled, site, resumes=job)


def _submit_once(
    request: JobRequest, site: Site, *, previous: Job | None = None, resumes: Job | None = None
) -> Job:
    if request.key and (known := keys.holder(request.key)) and (job := _confirmed(known)):
        return job
    ancestor = previous or resumes
    attempt = 0 if ancestor is None else len(_lineage(ancestor))

    def script(directory: Path) -> str:
        before = previous.directory if previous else None
        place = Place(directory, before, attempt, mark(directory))
        return render_script(request, site, Tools.here(), place)

    job = registry.create(
        request,
        site.scheduler,
        script,
        previous=previous.id if previous else None,
        resumes=resumes.id if resumes else None,
    )
    if request.key and (winner := keys.claim(request.key, job.id)) != job.id:
        registry.remove(job)
        return _confirmed(winner) or _submit_once(request, site, previous=previous, resumes=resumes)
    return _handed_over(job)


def _handed_over(job: Job) -> Job:
    """Submit the job to its scheduler; a refused job is removed."""
    try:
        progress = scheduler(job.scheduler).submit(job, dependencies(job))
    except LaunchError as error:
        if not isinstance(error, UnconfirmedError):
            forget(job)
        raise
    # A local job's state belongs to its runner from here on.
    if progress.scheduler_id is None:
        return dataclasses.replace(job, progress=progress)
    return registry.save(job, progress)


def _confirmed(job_id: str) -> Job | None:
    """Return a job of another submission under the same key, once its scheduler has it.

    That submission may still be running, or it was interrupted before the scheduler had the job,
    which is then submitted here. None: it was refused and has no record.
    """
    told = False
    while True:
        try:
            job = registry.load(job_id)
        except UsageError:
            return None
        if job.scheduler == "local" or job.progress.scheduler_id or job.state.final:
            return job
        if found := scheduler(job.scheduler).find(job):
            return registry.save(job, dataclasses.replace(job.progress, scheduler_id=found))
        if time.time() > job.submitted_at + SETTLE_S:
            return _handed_over(job)
        if not told:
            tell(f"waiting for {job_id}, which has the same key, at most {SETTLE_S:g} s")
        told = True
        time.sleep(ASK_AGAIN_S)


def _lineage(job: Job) -> list[str]:
    """Return the ids of this job and of those whose training it continues, newest first."""
    found = [job.id]
    while before := job.previous or job.resumes:
        try:
            job = registry.load(before)
        except UsageError:
            break  # its record was deleted
        found.append(job.id)
    return found


def render(request: JobRequest, tell: Callable[[str], object] = lambda _note: None) -> str:
    """Return the job script that :func:`submit` would submit; needs no scheduler here.

    ``tell`` is called with findings about this installation on the site.

    Raises:
        UsageError: all faults of the request, one per line.
    """
    filled, site = prepare(request, dry_run=True)
    for remark in site.remarks:
        tell(remark)
    place = Place(registry.jobs_dir() / f"{site.name}-dry-run")
    return render_script(filled, site, Tools.here(), place)


def prepare(request: JobRequest, *, dry_run: bool) -> tuple[JobRequest, Site]:
    """Return the filled request and its site.

    Raises:
        UsageError: all faults together; with ``dry_run``, a missing scheduler is not a fault.
    """
    workdir = (request.workdir or Path.cwd()).absolute()
    request = dataclasses.replace(request, workdir=workdir)
    faults = []
    site = None
    try:
        site = sites.choose(request.site)
    except UsageError as error:
        faults.append(str(error))
    facts = _look(request, workdir, site, dry_run)
    filled = request
    if site is not None:
        filled = complete(fill(request, site, {"account": env.get("QSGD_ACCOUNT")}))
        if site.scheduler == "slurm":
            filled = with_choice(filled, os.environ)
        faults += site_faults(filled, site, facts)
        faults += choice_faults(filled, site.scheduler)
        faults += after_faults(filled.after, site)
        faults += [] if dry_run else home_faults(registry.jobs_dir(), site.scheduler)
    faults = request_faults(filled, facts) + list(facts.folder_faults) + faults
    if faults or site is None:
        raise UsageError("\n".join(faults))
    network = parse_network(filled.network)
    if network is not None and not dry_run:
        trial(network, filled.nodes)
    site = site.at(filled.queue)
    return filled, mpi_fit.look(filled, site) if sites.serves(site.scheduler) else site


def _look(request: JobRequest, workdir: Path, site: Site | None, dry_run: bool) -> Facts:
    """Collect the facts about this machine for the check."""
    script = workdir / request.script
    near: tuple[str, ...] = ()
    fault = _script_fault(script, request)
    if fault and script.parent.is_dir():
        near = tuple(sorted(p.name for p in script.parent.iterdir() if p.is_file())[:500])
    command = SCHEDULERS[site.scheduler].command if site else None
    missing = command if command and not dry_run and not shutil.which(command) else None
    return Facts(
        fault,
        near if fault and "no script" in fault else (),
        missing,
        # Another machine's folders cannot be looked at.
        () if dry_run else tuple(_folder_faults(request, workdir)),
    )


def _folder_faults(request: JobRequest, workdir: Path) -> Sequence[str]:
    faults = []
    if not workdir.is_dir():
        faults.append(f"--workdir {workdir}: no such folder. Create it, or use another.")
    elif not os.access(workdir, os.W_OK | os.X_OK):
        faults.append(
            f"the job would run in '{workdir}', where you cannot write. Submit from a writable "
            "folder, or set one with --workdir."
        )
    if request.venv is not None and not (request.venv / "bin" / "activate").is_file():
        faults.append(
            f"--venv {request.venv}: it has no bin/activate. Use a folder that `python -m venv "
            "FOLDER` created."
        )
    return faults


def _script_fault(script: Path, request: JobRequest) -> str | None:
    try:
        if not script.exists():
            return f"there is no script '{script}'."
        if script.is_dir():
            return f"'{script}' is a folder. Use the script in it."
    except (OSError, ValueError) as error:
        return f"cannot access script {str(script)!r}: {error}"
    if not os.access(script, os.R_OK):
        return f"script '{script}' cannot be read. Use `chmod u+r` on it."
    if script.suffix != ".py" and not request.python and not os.access(script, os.X_OK):
        return (
            f"'{script}' is neither a .py file nor executable. Use `chmod +x` on it, or --python "
            "to name its interpreter."
        )
    return None
