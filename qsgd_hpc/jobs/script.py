"""Job scripts, rendered from a request and a site's profile.

Also the wrapper that pins each rank, and the scripts of *steps*: programs that run in sequence
inside one job, each on its first nodes. A job whose script is ``alone`` allocates the nodes. The
script of a step has the setup, variables, launcher and pinning of a job script, for some of them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import MappingProxyType

import jinja2

from qsgd_hpc import launch
from qsgd_hpc._data import data as shipped
from qsgd_hpc.errors import LaunchError, UsageError
from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.request.prepare import prepare
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.jobs.words import clock, listing
from qsgd_hpc.launch.cluster.network import NONE
from qsgd_hpc.launch.place import launchers
from qsgd_hpc.launch.schedulers import NODE_FILES, SCHEDULERS

__all__ = [
    "Place",
    "Step",
    "Tools",
    "by_rank",
    "cores_per_rank",
    "first_nodes",
    "host_lines",
    "known_launcher",
    "lines_per_host",
    "node_lines",
    "render_script",
    "render_wrapper",
    "step_scripts",
]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Launchers of one family only; mpiexec and ibrun exist in several.
_PROGRAMS = {"srun": "slurm", "flux": "flux", "jsrun": "jsm"}


@dataclass(frozen=True)
class Tools:
    """The programs of this installation.

    Attributes:
        python, qsgd_hpc: the values of {python} and {qsgd_hpc} in profiles.
        holder: path of the program that reserves a port, see launch/hold_port.py.
        start_up: a folder for PYTHONPATH, see launch/start_up.
    """

    python: str
    qsgd_hpc: tuple[str, ...]
    holder: str = "hold_port.py"
    start_up: str = "start_up"

    @classmethod
    def here(cls) -> Tools:
        """Return this interpreter and its ``qsgd-hpc``.

        ``-P`` keeps the job's folder off the module path of qsgd-hpc itself: a user's
        ``queue.py`` or ``types.py`` must not replace a module of the standard library.
        """
        safe = ("-P",) if sys.version_info >= (3, 11) else ()
        command = (sys.executable, *safe, "-m", "qsgd_hpc")
        script = Path(sysconfig.get_path("scripts")) / "qsgd-hpc"
        own = (str(script),) if not safe and script.is_file() else command
        beside = Path(launch.__file__)
        holder, start_up = (str(beside.with_name(n)) for n in ("hold_port.py", "start_up"))
        return cls(sys.executable, own, holder, start_up)


@dataclass(frozen=True)
class Place:
    """The location of a job's record, and the jobs that it depends on.

    Attributes:
        directory: the job's folder, for events and output.
        previous: folder of the part of a chain that this job continues.
        attempt: number of earlier jobs of the same training.
        mark: text by which the scheduler can find the job.
        resumes: folders of arrays whose completed tasks need not run again.
    """

    directory: Path
    previous: Path | None = None
    attempt: int = 0
    mark: str = ""
    resumes: tuple[Path, ...] = ()


def render_script(request: JobRequest, site: Site, tools: Tools, place: Place) -> str:
    """Return the job script for a request that :func:`validate.fill` has filled.

    Raises:
        UsageError: a value cannot be part of a directive, or the user's template is faulty.
    """
    site = site.without(request.without)
    fields = _fields(request, site)
    variables = _variables(request, site, place)
    wrapper = _wrapper(request, site, tools, variables)
    scheduler = SCHEDULERS[site.scheduler]
    directives = sum((each.directives for each in site.libraries_in_use), site.directives)
    values = {
        "site": site,
        "request": request,
        "walltime": None if request.walltime_min is None else clock(request.walltime_min),
        "workdir": str(request.workdir or Path.cwd()),
        "directives": [_formatted(line, fields, tools)[0] for line in directives],
        "extra": [line.removeprefix(scheduler.directive).strip() for line in request.extra],
        "variables": variables,
        "unset": _unset(request, site),
        "library_path": [folder for each in site.libraries_in_use for folder in each.path],
        "launcher": [] if request.alone else _launcher(request, site, fields, tools),
        "command": _command(request, site, tools),
        "wrapper": wrapper,
        "first_node": site.meeting_address or scheduler.prints_first_node,
        "holder": [request.interpreter(site.python, tools.python), "-I", "-S", tools.holder],
        "attempt": place.attempt,
        "wrapper_end": _absent_line(wrapper or ""),
        "tasks": request.tasks,
        "job_dir": str(place.directory),
        "mark": place.mark,
        "previous": None if place.previous is None else str(place.previous),
        "previous_id": None if place.previous is None else place.previous.name,
        "resumes": [str(folder) for folder in place.resumes],
        "stop_after_s": _stop_after_s(request),
    }
    try:
        return _template(request, site).render(values)
    except jinja2.TemplateError as error:
        if request.template is None:
            raise
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise UsageError(
            f"--template {request.template}{line}: {error}. Available values: "
            f"{listing(values, 'and')}."
        ) from None


def _template(request: JobRequest, site: Site) -> jinja2.Template:
    if request.template is None:
        return _templates().get_template(f"{site.scheduler}.sh.j2")
    try:
        text = request.template.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"--template {request.template}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--template {request.template}: cannot read it: {error}") from None
    return _templates().from_string(text)


def _stop_after_s(request: JobRequest) -> int | None:
    if request.walltime_min is None:
        return None
    return max(1, round((request.walltime_min - (request.stop_before_min or 0)) * 60))


def _wrapper(
    request: JobRequest, site: Site, tools: Tools, variables: dict[str, str]
) -> str | None:
    """Return the wrapper that each rank runs before the program.

    None on the local site, whose launcher pins ranks, and for a program that starts ranks itself.
    The wrapper also exports the variables, because not every launcher sends them to other nodes.
    """
    if site.scheduler == "local" or request.alone:
        return None
    threads = cores_per_rank(request, site) if site.cores else None
    if "OMP_NUM_THREADS" in variables:
        threads = None
    exports = {**variables, "QSGD_RANKS": str(request.ranks)}
    start_up = tools.start_up if request.sets_torchrun else None
    return render_wrapper(request, site, omp_threads=threads, exports=exports, start_up=start_up)


def _absent_line(text: str) -> str:
    """Return a delimiter for a here-document that is not a line of the text."""
    word = "END_OF_PIN_SH"
    while word in text.split("\n"):
        word += "_"
    return word


def _fields(request: JobRequest, site: Site) -> dict[str, int]:
    """Return the values of {name} fields in launcher.argv and directives."""
    per_node = request.ranks_per_node or 1
    depth = cores_per_rank(request, site)
    return {
        "nodes": request.nodes,
        "ranks": request.ranks,
        "ranks_per_node": per_node,
        "gpus": site.gpus,
        "depth": depth,
        "cpus_per_rank": depth * site.threads_per_core,
    }


def _formatted(word: str, fields: dict[str, int], tools: Tools) -> list[str]:
    if word == "{qsgd_hpc}":
        return list(tools.qsgd_hpc)
    return [word.format(**fields, python=tools.python, qsgd_hpc=shlex.join(tools.qsgd_hpc))]


def _variables(request: JobRequest, site: Site, place: Place) -> dict[str, str]:
    """Return the job's variables; the user's take precedence."""
    attempt = {"QSGD_ATTEMPT": str(place.attempt)} if place.attempt else {}
    used = {k: v for each in site.libraries_in_use for k, v in each.env.items()}
    return {**attempt, **site.env, **used, **request.env}


def _unset(request: JobRequest, site: Site) -> list[str]:
    """Return the variables of libraries that are not used: the site's modules may set them."""
    names = [name for each in site.libraries if not each.use for name in each.env]
    return [name for name in names if name not in request.env]


def _launcher(
    request: JobRequest, site: Site, fields: dict[str, int], tools: Tools
) -> list[list[str]]:
    """Return the launcher's arguments, one list for each line of the script."""
    words: list[str] = []
    for raw in site.launcher_argv:
        if raw == "{label}":  # lines of a single rank need no label
            words += site.launcher_label if fields["ranks"] > 1 else ()
        elif raw == "{network}":
            words += ("--network", request.network) if request.network not in (None, NONE) else ()
        else:
            words += _formatted(raw, fields, tools)
    if site.launcher_argv[:2] == ("{qsgd_hpc}", "run") and not request.sets_torchrun:
        words.insert(len(tools.qsgd_hpc) + 1, "--no-torchrun")
    return [words]


def _command(request: JobRequest, site: Site, tools: Tools) -> list[str]:
    script = str((request.workdir or Path.cwd()) / request.script)
    words = [script, *request.script_args]
    if request.is_python:
        compat = ("-m", "qsgd_hpc.horovod_compat") if request.horovod else ()
        words[:0] = [request.interpreter(site.python, tools.python), *compat]
    if ":" in words:
        # Every mpiexec takes an argument ":" for a separator of programs; inside a word it is safe.
        # The last word is bash's name; the words of an array's task follow.
        return ["/bin/bash", "-c", f'exec {shlex.join(words)} "$@"', "bash"]
    return words


@functools.cache
def _templates() -> jinja2.Environment:
    """Return the environment of templates/*.sh.j2; the filter ``sh`` quotes for the shell."""
    folder = shipped("templates")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = shlex.quote
    environment.filters["directive"] = _directive
    return environment


def _directive(value: object) -> str:
    """Return the value if it can be part of a directive, where quoting is not possible."""
    text = str(value)
    if not re.fullmatch(r"[ -~]+", text) or re.search(r"[\"'\\`$#]", text):
        raise UsageError(
            f"{text!r} cannot be part of a scheduler directive: quotes, $, #, backslashes, line "
            "breaks and non-ASCII letters are not allowed there."
        )
    return text


def known_launcher(site: Site) -> str | None:
    """Return the family (see ``place.LAUNCHERS``) of the site's launcher, if it is known."""
    return _PROGRAMS.get(PurePath(site.launcher_argv[0]).name)


def _gpu_view(request: JobRequest, site: Site) -> str | None:
    """Return the GPUs that the wrapper shows to a rank: ``all``, ``one``, or None: not changed.

    It is None if there are no GPUs, the launcher binds them, or the user sets the variable.
    """
    if not (site.gpu and site.gpu.order) or site.gpu.bound_by == "launcher":
        return None
    return None if site.gpu.variable in request.env else request.gpu_view or site.gpu.view


def by_rank(values: tuple[str, ...], ranks: int) -> tuple[str, ...]:
    """Return the value of each local rank; with fewer values than ranks, neighbours share one."""
    if not values or ranks <= len(values):
        return values
    return tuple(values[rank * len(values) // ranks] for rank in range(ranks))


def cores_per_rank(request: JobRequest, site: Site) -> int:
    """Return the number of cores of one rank, at least 1.

    With fewer ranks than GPUs on a node, a rank gets the cores for one GPU, so that it stays near
    its own.
    """
    return max(1, (site.cores or 1) // max(request.ranks_per_node or 1, site.gpus, 1))


def render_wrapper(
    request: JobRequest,
    site: Site,
    *,
    omp_threads: int | None,
    exports: Mapping[str, str] = MappingProxyType({}),
    start_up: str | None = None,
) -> str:
    """Return the bash script that each rank runs before its program.

    ``bash pin.sh PROGRAM ARGS...`` sets the rank's variables and executes the program. Variables
    that the user sets by ``--env`` are not changed. If a list is shorter than the ranks of a node,
    neighbours share a value: of eight ranks, 4 and 5 get the third of four GPUs.

    Args:
        request: filled by :func:`validate.fill`.
        site: the profile.
        omp_threads: OMP_NUM_THREADS of a rank; None: not changed.
        exports: variables that every rank gets.
        start_up: a folder to put first on PYTHONPATH; None: not changed.
    Raises:
        UsageError: the profile's local_rank_variables contain an invalid name.
    """
    for name in site.local_rank_variables:
        if not _VARIABLE.fullmatch(name):
            raise UsageError(
                f"site '{site.name}': local_rank_variables: {name!r} is not a valid name of a "
                "variable: use letters, digits and _."
            )
    per_node = request.ranks_per_node or 1
    local_ranks, ranks, _, _ = zip(*launchers(known_launcher(site)), strict=True)
    nic = site.nic if site.nic and site.nic.variable not in request.env else None
    return (
        _templates()
        .get_template("pin.sh.j2")
        .render(
            site=site,
            exports=exports,
            start_up=start_up,
            ranks_per_node=per_node,
            gpu=site.gpu,
            gpus=by_rank(site.gpu.order, per_node) if site.gpu else (),
            view=_gpu_view(request, site),
            nic=nic if nic and nic.order else None,
            nics=by_rank(nic.order, per_node) if nic else (),
            cpus=by_rank(site.cpu.lists, per_node) if site.cpu.bound_by == "wrapper" else (),
            torchrun=request.sets_torchrun,
            nodes=request.nodes,
            ranks=request.ranks,
            # Under other launchers, SLURM_NODEID is that of the batch script's node on every rank.
            node_name="SLURM_NODEID" if known_launcher(site) == "slurm" else "PALS_NODEID",
            omp_threads=None if "OMP_NUM_THREADS" in request.env else omp_threads,
            local_rank_names=_lines((*site.local_rank_variables, *local_ranks)),
            rank_names=_lines(ranks),
            remedy=f"Find one with: {site.launcher_argv[0]} -n 2 env | grep -i rank. Add it to "
            f"the profile, sites/{site.name}.yaml in QSGD_HOME: local_rank_variables: "
            "[NAME]",
        )
    )


def _lines(names: Iterable[str]) -> list[str]:
    """Return the names, each once, in readable lines."""
    return textwrap.wrap(" ".join(dict.fromkeys(names)), 76)


OWN = "{qsgd_hpc}"
SCONTROL_LIMIT_S = 60.0


@dataclass(frozen=True)
class Step:
    """A program on the first nodes of a job.

    Attributes:
        request: script, arguments, variables, nodes and network of the step; other fields are
            ignored, because the job's values apply.
        directory: folder in which the step records its start and end.
        hosts: path of the file with its :func:`host_lines`.
    """

    request: JobRequest
    directory: Path
    hosts: Path


def step_scripts(job: JobRequest, steps: Sequence[Step]) -> tuple[list[str], int | None]:
    """Return the scripts that run these steps inside a job, and the host lines per step.

    Raises:
        UsageError: the job is faulty, or the site's launcher cannot be restricted to some nodes.
    """
    filled, site = prepare(job, dry_run=True)
    scripts = []
    for step in steps:
        restricted = dataclasses.replace(site, launcher_argv=first_nodes(site, step.hosts))
        own = dataclasses.replace(
            filled,
            script=step.request.script,
            script_args=step.request.script_args,
            nodes=step.request.nodes,
            network=step.request.network or filled.network,
            env=step.request.env,
            name=step.request.name,
            alone=False,
            walltime_min=None,  # the job's limit applies
            stop_before_min=None,
        )
        scripts.append(render_script(own, restricted, Tools.here(), Place(step.directory)))
    return scripts, lines_per_host(site, filled.ranks_per_node or 1)


def first_nodes(site: Site, hosts: Path) -> tuple[str, ...]:
    """Return the site's launcher with options that restrict it to the nodes of a host file.

    Raises:
        UsageError: this launcher has no such option.
    """
    if site.scheduler == "local":
        return site.launcher_argv
    first, *rest = site.launcher_argv
    file = str(hosts).replace("{", "{{").replace("}", "}}")
    program = PurePath(first).name
    if program == "srun":
        return (first, "--nodes={nodes}", "--relative=0", *rest)
    if program == "ibrun":
        return (first, "-n", "{ranks}", "-o", "0", *rest)
    if program in ("mpiexec", "mpirun"):
        return (first, "--hostfile", file, *rest)
    if first == OWN and rest[:1] == ["run"]:
        return (first, "run", "--hostfile", file, *rest[1:])
    raise UsageError(
        f"site {site.name} starts ranks with {program}, which cannot be restricted to a part of "
        "a job's nodes. Use a job for each point (--separate)."
    )


def host_lines(lines: Iterable[str], nodes: int, per_host: int | None) -> list[str]:
    """Return the host file of the first nodes.

    Args:
        lines: the job's node file, in which the scheduler lists each node once, or once per rank.
        nodes: number of nodes.
        per_host: lines for each node; None keeps those of the node file.
    """
    given = [line.strip() for line in lines if line.strip()]
    first = list(dict.fromkeys(given))[:nodes]
    if per_host is None:
        return [line for line in given if line in first]
    return [host for host in first for _ in range(per_host)]


def lines_per_host(site: Site, ranks_per_node: int) -> int | None:
    """Return how often a step's host file lists each node; None: as often as the scheduler's file.

    A site's MPI expects the scheduler's format; ``qsgd-hpc run`` starts one rank per line.
    """
    return ranks_per_node if site.launcher_argv[0] == OWN else None


def node_lines(environ: Mapping[str, str]) -> Sequence[str]:
    """Return the lines of the current job's node file; none on a single machine.

    Raises:
        LaunchError: Slurm does not answer.
    """
    for name in NODE_FILES:
        if file := environ.get(name):
            return Path(file).read_text().splitlines()
    if not (nodes := environ.get("SLURM_JOB_NODELIST")):
        return ()
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            text=True,
            timeout=SCONTROL_LIMIT_S,
            check=True,
            env={**os.environ, **environ},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"scontrol did not return the nodes of the job: {error}") from None
    return done.stdout.split()
