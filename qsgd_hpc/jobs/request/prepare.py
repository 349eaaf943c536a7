"""Fill a request and find all its faults, from its site's profile and this machine."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import registry, sites
from qsgd_hpc.jobs.current import refreshed
from qsgd_hpc.jobs.model import JobRequest, JobState, dependency
from qsgd_hpc.jobs.request.python_fit import fit_launcher, noted, package_faults
from qsgd_hpc.jobs.request.validate import (
    choice_faults,
    complete,
    fill,
    home_faults,
    request_faults,
    site_faults,
    site_notes,
)
from qsgd_hpc.jobs.schedulers.local import other_host
from qsgd_hpc.jobs.schedulers.slurm_answers import with_choice
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.jobs.words import did_you_mean
from qsgd_hpc.launch.cluster import parse as parse_network
from qsgd_hpc.launch.cluster.keeper import trial
from qsgd_hpc.launch.options import notebook_fault
from qsgd_hpc.launch.rendezvous import starter
from qsgd_hpc.launch.schedulers import SCHEDULERS

__all__ = ["RUN_MODULE", "prepare"]

_LAUNCHERS = frozenset({"mpirun", "mpiexec", "srun", "ibrun", "jsrun", "aprun", "horovodrun"})

RUN_MODULE = (
    "submit a script that runs the module: "
    "import runpy; runpy.run_module('package.train', run_name='__main__')"
)


def prepare(
    request: JobRequest, *, dry_run: bool, tell: Callable[[str], object] = lambda _note: None
) -> tuple[JobRequest, Site]:
    """Return the filled request and its site; call ``tell`` with each note about the site.

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
    filled = request
    if site is not None:
        filled = complete(fill(request, site, env.get("QSGD_ACCOUNT")))
        if site.scheduler == "slurm":
            filled = with_choice(filled, os.environ)
        faults += site_faults(filled, site)
        if not dry_run:
            faults += _command_faults(site)
        faults += choice_faults(filled, site.scheduler)
        faults += _python_fault(filled, site, workdir, dry_run=dry_run)
        faults += _after_faults(filled.after, site, ask=not dry_run)
        if not dry_run:
            faults += home_faults(registry.jobs_dir(), site.scheduler)
            faults += package_faults(filled, site)
    # The script may be for another machine, whose folders cannot be checked here.
    folders = () if dry_run else _folder_faults(request, workdir)
    script = _script_faults(request, workdir / request.script)
    faults = [*script, *request_faults(filled), *folders, *faults]
    if faults or site is None:
        raise UsageError("\n".join(faults))
    network = parse_network(filled.network)
    if network is not None and not dry_run:
        trial(network, filled.nodes)
    site = site.at(filled.queue)
    if sites.serves(site.scheduler):
        site = fit_launcher(filled, site)
    site = site if dry_run else noted(filled, site)
    for note in site_notes(filled, site):
        tell(note)
    return filled, site


def _after_faults(after: Iterable[str], site: Site, *, ask: bool) -> list[str]:
    """Return the faults of a new job's dependencies.

    ``ask``: query their scheduler first, and record their states: they may have ended since.
    """
    faults, found = [], {}
    for word in after:
        try:
            found[word] = registry.load(dependency(word)[1])
        except UsageError as error:
            faults.append(f"--after {word}: {error}")
    if ask:
        found = dict(zip(found, refreshed(list(found.values())), strict=True))
    for word, job in found.items():
        kind, job_id = dependency(word)
        if job.scheduler != site.scheduler or job.site != site.name:
            faults.append(
                f"--after {word}: that job is on {job.site}, this one would be on {site.name}. "
                f"Jobs can only wait for jobs of the same site: use --site {job.site}."
            )
        elif (host := other_host(job)) and not job.state.ended:
            faults.append(
                f"--after {word}: that job runs on host {host}, and jobs of a machine without a "
                "scheduler wait for jobs of the same host only. Submit this one there, or after it "
                "has ended."
            )
        elif kind == "ok" and job.state.ended and job.state is not JobState.COMPLETED:
            faults.append(
                f"--after {word}: that job is {job.state.value}, so this one would never start. "
                f"Use --after any:{job_id}, or resubmit it with `qsgd-hpc resubmit {job_id}`."
            )
    return faults


def _command_faults(site: Site) -> Iterator[str]:
    command = SCHEDULERS[site.scheduler].command
    if command and not shutil.which(command):
        yield (
            f"{site.name} submits with {command}, which is not on PATH here. Log in to "
            f"{site.name}, or add --dry-run to see the script, or --site for another site."
        )


def _folder_faults(request: JobRequest, workdir: Path) -> Iterator[str]:
    if not workdir.is_dir():
        yield f"--workdir {workdir}: no such folder. Create it, or use another."
    elif not os.access(workdir, os.W_OK | os.X_OK):
        yield (
            f"the job would run in '{workdir}', where you cannot write. Submit from a writable "
            "folder, or set one with --workdir."
        )
    if request.venv is not None and not (workdir / request.venv / "bin" / "activate").is_file():
        yield (
            f"--venv {request.venv}: it has no bin/activate. Use a folder that `python -m venv "
            "FOLDER` created."
        )


def _python_fault(
    request: JobRequest, site: Site, workdir: Path, *, dry_run: bool
) -> Iterator[str]:
    """Yield the fault of a --python with arguments, or that a job on this machine would not find.

    With ``dry_run``, the script may be for another machine, whose programs are unknown here.
    """
    python = request.python or ""
    program, *words = python.split() or [python]
    # A path may contain spaces.
    if words and not (Path(python).is_file() or ("/" in program and not shutil.which(program))):
        yield (
            f"--python {python!r}: use one program, without arguments. For a container, write an "
            f'executable script with the lines `#!/bin/bash` and `exec {python} "$@"`, and use '
            "--python with its path."
        )
        return
    changed = request.modules or request.conda or request.venv or site.setup
    changed = changed or "PATH" in {**site.env, **request.env}
    if dry_run or site.scheduler != "local" or not python or changed:
        return
    if not shutil.which(str(workdir / python) if "/" in python else python):
        yield (
            f"--python {python}: there is no such program here. Use the name of one in PATH, or "
            "its path."
        )


def _script_faults(request: JobRequest, script: Path) -> Iterator[str]:
    try:
        if not script.exists():
            yield _program_fault(request) or f"there is no script '{script}'.{_similar(script)}"
        elif script.is_dir():
            yield f"'{script}' is a folder. Use the script in it."
        elif not os.access(script, os.R_OK):
            yield f"script '{script}' cannot be read. Use `chmod u+r` on it."
        elif fault := notebook_fault(script):
            yield fault
        elif script.suffix != ".py" and not request.python and not os.access(script, os.X_OK):
            yield (
                f"'{script}' is neither a .py file nor executable. Use `chmod +x` on it, or "
                "--python to name its interpreter."
            )
    except (OSError, ValueError) as error:
        yield f"cannot access script {str(script)!r}: {error}"


def _similar(script: Path) -> str:
    """Return a question with a similar name of the script's folder; empty if there is none."""
    folder = script.parent
    files = [path.name for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    hint = did_you_mean(script.name, sorted(files)[:500])
    return f" {hint}" if hint.startswith("Did") else ""


def _program_fault(request: JobRequest) -> str | None:
    """Return the remedy for a program that starts scripts in place of the script, else None."""
    program, words = request.script.name, request.script_args
    known = program if program in _LAUNCHERS else starter((program, *words))
    if known is None and not re.fullmatch(r"python[\d.]*", program):
        return None
    if known is None and "-m" in words[:1]:
        return f"leave out '{program} -m': {RUN_MODULE}."
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    flags = f"--nodes {request.nodes}{' --horovod' if known == 'horovodrun' else ''}"
    right = f"qsgd-hpc submit {flags} {shlex.join(words[at:] or ['train.py'])}"
    if known is None:
        return f"leave out '{program}', which submit adds (--python selects one): {right}"
    ranks = "submit starts the ranks itself, and --ranks-per-node sets their number on each node"
    return f"leave out {known}: {ranks}: {right}"
