"""Fill a request and find all its faults, from its site's profile and this machine."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites
from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.records import registry
from qsgd_hpc.jobs.request import mpi_fit
from qsgd_hpc.jobs.request.choices import choice_faults, complete, home_faults
from qsgd_hpc.jobs.request.dependencies import after_faults
from qsgd_hpc.jobs.request.validate import Facts, fill, request_faults, site_faults
from qsgd_hpc.jobs.schedulers.slurm_clusters import with_choice
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.launch.cluster import parse as parse_network
from qsgd_hpc.launch.cluster.keeper import trial
from qsgd_hpc.launch.schedulers import SCHEDULERS

__all__ = ["prepare"]


def prepare(request: JobRequest, *, dry_run: bool) -> tuple[JobRequest, Site]:
    """Return the filled request and its site.

    Raises:
        UsageError: all faults together; with ``dry_run``, a missing scheduler is not a fault.
    """
    workdir = (request.workdir or Path.cwd()).absolute()
    # Not relative: a job is also resubmitted from other folders.
    template = request.template and request.template.absolute()
    request = dataclasses.replace(request, workdir=workdir, template=template)
    faults = []
    site = None
    try:
        site = sites.choose(request.site)
    except UsageError as error:
        faults.append(str(error))
    facts = _facts(request, workdir, site, dry_run)
    filled = request
    if site is not None:
        filled = complete(fill(request, site, {"account": env.get("QSGD_ACCOUNT")}))
        if site.scheduler == "slurm":
            filled = with_choice(filled, os.environ)
        faults += site_faults(filled, site, facts)
        faults += choice_faults(filled, site.scheduler)
        faults += after_faults(filled.after, site, ask=not dry_run)
        faults += [] if dry_run else home_faults(registry.jobs_dir(), site.scheduler)
    faults = request_faults(filled, facts) + list(facts.folder_faults) + faults
    if faults or site is None:
        raise UsageError("\n".join(faults))
    network = parse_network(filled.network)
    if network is not None and not dry_run:
        trial(network, filled.nodes)
    site = site.at(filled.queue)
    return filled, mpi_fit.look(filled, site) if sites.serves(site.scheduler) else site


def _facts(request: JobRequest, workdir: Path, site: Site | None, dry_run: bool) -> Facts:
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
        # The script may be for another machine, whose folders cannot be checked here.
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
    if request.venv is not None and not _activates(workdir / request.venv):
        faults.append(
            f"--venv {request.venv}: it has no bin/activate. Use a folder that `python -m venv "
            "FOLDER` created."
        )
    return faults


def _activates(venv: Path) -> bool:
    return (venv / "bin" / "activate").is_file()


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
