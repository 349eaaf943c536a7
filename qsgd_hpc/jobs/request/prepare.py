"""Fill a request and find all its faults, from its site's profile and this machine."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites
from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.records import registry
from qsgd_hpc.jobs.request import mpi_fit
from qsgd_hpc.jobs.request.dependencies import after_faults
from qsgd_hpc.jobs.request.package_fit import noted, package_faults
from qsgd_hpc.jobs.request.validate import Facts, fill, request_faults, site_faults
from qsgd_hpc.jobs.schedulers.slurm_clusters import with_choice
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.jobs.words import clock, listing
from qsgd_hpc.launch.cluster import parse as parse_network
from qsgd_hpc.launch.cluster.keeper import trial
from qsgd_hpc.launch.meeting import starter
from qsgd_hpc.launch.schedulers import SCHEDULERS

__all__ = ["RUN_MODULE", "choice_faults", "complete", "default_stop_before", "prepare"]


RUN_MODULE = (
    "submit a script that runs the module: "
    "import runpy; runpy.run_module('package.train', run_name='__main__')"
)


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
        if not dry_run:
            faults += home_faults(registry.jobs_dir(), site.scheduler)
            faults += package_faults(filled, site)
            faults += _absent_python(filled, site, workdir)
    faults = request_faults(filled, facts) + list(facts.folder_faults) + faults
    if faults or site is None:
        raise UsageError("\n".join(faults))
    network = parse_network(filled.network)
    if network is not None and not dry_run:
        trial(network, filled.nodes)
    site = site.at(filled.queue)
    if sites.serves(site.scheduler):
        site = mpi_fit.look(filled, site)
    return filled, site if dry_run else noted(filled, site)


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


def _absent_python(request: JobRequest, site: Site, workdir: Path) -> Iterator[str]:
    """Yield the fault of a --python that this machine lacks, if the job runs here as it is."""
    python = request.python
    changed = request.modules or request.conda or request.venv or site.setup
    if site.scheduler != "local" or not python or changed or "PATH" in {**site.env, **request.env}:
        return
    if not any(_python_faults(request)) and not shutil.which(
        str(workdir / python) if "/" in python else python
    ):
        yield (
            f"--python {python}: there is no such program here. Use the name of one in PATH, or "
            "its path."
        )


def _python_faults(request: JobRequest) -> Iterator[str]:
    """Yield the fault of a --python that consists of a program and its arguments."""
    python = request.python or ""
    program, *words = python.split() or [python]
    if not words or Path(python).is_file() or ("/" in program and not shutil.which(program)):
        return  # a path may contain spaces
    yield (
        f"--python {python!r}: use one program, without arguments. For a container, write an "
        f'executable script with the lines `#!/bin/bash` and `exec {python} "$@"`, and use '
        "--python with its path."
    )


def _activates(venv: Path) -> bool:
    return (venv / "bin" / "activate").is_file()


def _script_fault(script: Path, request: JobRequest) -> str | None:
    try:
        if not script.exists():
            return _program_fault(request) or f"there is no script '{script}'."
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


def _program_fault(request: JobRequest) -> str | None:
    """Return the remedy for a program that starts scripts in place of the script, else None."""
    program, words = request.script.name, request.script_args
    known = starter((program, *words))
    if known is None and not re.fullmatch(r"python[\d.]*", program):
        return None
    if known is None and "-m" in words[:1]:
        return f"leave out '{program} -m': {RUN_MODULE}."
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    right = f"qsgd-hpc submit --nodes {request.nodes} {shlex.join(words[at:] or ['train.py'])}"
    if known is None:
        return f"leave out '{program}', which submit adds (--python selects one): {right}"
    ranks = "submit starts the ranks itself, and --ranks-per-node sets their number on each node"
    return f"leave out {known}: {ranks}: {right}"


_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# Directives that set the walltime.
_TIMES = {
    "slurm": re.compile(r"--time[= ]|-t"),
    "pbs": re.compile(r"-l\s*(\S+,)?walltime="),
    "lsf": re.compile(r"-W\s*\d"),
    "cobalt": re.compile(r"--time[= ]|-t"),
}
_UNQUOTABLE = re.compile(r"[\"'\\`$#]|[^ -~]")  # see the filter `directive`
_QUOTED = re.compile(r"""(["'])([^\s"'\\`$#]*)\1""")  # a word that needs no quotes
STOP_BEFORE_MIN, STOP_BEFORE_SHARE = 5.0, 0.1
TASKS_CEILING = 10_000


def complete(request: JobRequest) -> JobRequest:
    """Fill in the time to stop, and convert an array of one task to a plain job.

    A script needs time to write its checkpoint: 5 minutes, or a tenth of a short walltime.
    """
    if request.stop_before_min is None and request.walltime_min is not None:
        before = default_stop_before(request.walltime_min)
        request = dataclasses.replace(request, stop_before_min=before)
    if len(request.tasks) == 1 and not any(_array_faults(request)):
        words = (*request.script_args, *request.tasks[0])
        request = dataclasses.replace(request, script_args=words, array={}, at_once=None)
    return request


def default_stop_before(walltime_min: float) -> float:
    """Return the minutes before the end of a walltime at which a script is asked to stop."""
    return min(STOP_BEFORE_MIN, STOP_BEFORE_SHARE * walltime_min)


def choice_faults(request: JobRequest, scheduler: str) -> list[str]:
    """Return every fault of these options, each with its remedy."""
    return [
        *_array_faults(request),
        *_chain_faults(request, scheduler),
        *_python_faults(request),
        *_text_faults(request, scheduler),
    ]


def home_faults(folder: Path, scheduler: str) -> list[str]:
    """Return why a scheduler cannot write output to the folder of jobs, with the remedy."""
    text = str(folder)
    traits = SCHEDULERS[scheduler]
    if traits.bad_path is None:
        return []
    pattern, wrong = traits.bad_path
    if not re.search(pattern, text):
        return []
    return [
        f"the output would be written to {text!r}, but {traits.command} does not accept a path "
        f"with {wrong}. Set QSGD_HOME to another folder."
    ]


def _array_faults(request: JobRequest) -> Iterator[str]:
    for key, values in request.array.items():
        if not _OPTION.fullmatch(key):
            yield f"--array {key!r}: write the option without dashes, as in lr=0.1,0.2."
        if not values:
            yield f"--array {key}: it has no value. Write --array {key}=A,B."
        if any("\0" in value for value in values):
            yield (
                f"--array {key}: a value contains a NUL byte, which is not possible in a command."
            )
    # The options of a single task become the script's own, which are quoted.
    if len(request.tasks) > 1 and any(":" in values for values in request.array.values()):
        yield "--array: a value ':' would be mpiexec's separator of programs. Use another word."
    if len(request.tasks) > TASKS_CEILING:
        yield (
            f"--array creates {len(request.tasks)} tasks; the maximum is {TASKS_CEILING}. Split it."
        )
    if request.at_once is not None and not request.array:
        yield "--at-once limits the tasks of an array; add --array, or remove it."
    elif request.at_once is not None and request.at_once < 1:
        yield f"--at-once {request.at_once}: use at least 1."


def _chain_faults(request: JobRequest, scheduler: str) -> Iterator[str]:
    if request.chain < 1:
        yield f"--chain {request.chain}: a chain has at least 1 part."
    if request.chain > 1 and request.array:
        yield "--chain and --array exclude each other. Submit one chain for each choice."
    if request.requeue and not SCHEDULERS[scheduler].requeues:
        yield (
            f"--requeue: {scheduler} cannot restart a job automatically. Use --chain N, or "
            "`qsgd-hpc resubmit ID` after its end."
        )
    if request.requeue and request.chain > 1:
        yield "--requeue and --chain both continue a job that stopped. Use one of them."
    if request.chain > 1 and not SCHEDULERS[scheduler].waits_for_any:
        yield (
            f"--chain: jobs of {scheduler} can wait for success only. Use `qsgd-hpc resubmit ID`."
        )
    before, walltime_min = request.stop_before_min, request.walltime_min
    if before and walltime_min is None:
        yield "--stop-before: the job has no walltime before which to stop. Add --walltime."
    if before is None or walltime_min is None:
        return
    if before < 0 or before >= walltime_min:
        yield (
            f"--stop-before {clock(max(before, 0))}: the walltime of the job is "
            f"{clock(walltime_min)}. Use a shorter time."
        )


def _extra_remedy(line: str, prefix: str) -> str:
    bare = _QUOTED.sub(r"\2", line)
    if not _UNQUOTABLE.search(bare.removeprefix(prefix)):
        return f"leave out the quotes, as no shell reads this line: --extra '{bare}'."
    return (
        "quotes, $, #, `, backslashes and non-ASCII characters are not possible in a directive. "
        "Use --template with a copy of the included template, and write the line there."
    )


def _text_faults(request: JobRequest, scheduler: str) -> Iterator[str]:
    prefix = SCHEDULERS[scheduler].directive
    batch = [each.directive for each in SCHEDULERS.values() if each.command]
    for line in request.extra:
        others = [each for each in batch if line.startswith(each)]
        if "\n" in line or not line.removeprefix(prefix).strip():
            yield f"--extra {line!r}: one directive, on one line, such as '{prefix} -X value'."
        elif scheduler == "local":
            yield f"--extra {line!r}: there is no scheduler here to read it. Remove it."
        elif others and prefix not in others:
            yield (
                f"--extra {line!r}: this is a directive for {others[0][1:]}; here, directives "
                f"begin with {prefix}."
            )
        elif scheduler in _TIMES and _TIMES[scheduler].match(line.removeprefix(prefix).strip()):
            yield f"--extra {line!r}: use --walltime, which should_stop() knows."
        elif _UNQUOTABLE.search(line.removeprefix(prefix)):
            yield f"--extra {line!r}: {_extra_remedy(line, prefix)}"
    if request.exclude and not SCHEDULERS[scheduler].excludes:
        yield (
            f"--exclude: {scheduler} does not support it. Remove it and report bad nodes to the "
            f"site, or request other nodes with --extra '{prefix} ...'."
        )
    for node in request.exclude:
        if not _HOST.fullmatch(node):
            yield f"--exclude {node!r}: write names of nodes, as in --exclude nid0001,nid0002."
    words = {"--modules": request.modules, "--conda": (request.conda or "-",)}
    for flag, names in words.items():
        if any(not name.strip() or not name.isprintable() for name in names):
            yield f"{flag} {listing(map(repr, names), 'and')}: use printable names."
    if request.key is not None and not request.key.strip():
        yield (
            "--key: the key is empty. Use one that is unique to this submission, such as a date."
        )
