"""From a filled request and a profile to the text of the job script. Pure."""

from __future__ import annotations

import functools
import re
import shlex
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import jinja2

from qsgd_hpc._data import data as shipped
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.profile import Site
from qsgd_hpc.jobs.words import clock

__all__ = ["Tools", "render_script"]


@dataclass(frozen=True)
class Tools:
    """The programs of this installation that a profile may name by {python} and {qsgd_hpc}."""

    python: str
    qsgd_hpc: tuple[str, ...]

    @classmethod
    def here(cls) -> Tools:
        """Return this interpreter and its ``qsgd-hpc``.

        ``-P`` keeps the job's own folder off the module path of qsgd-hpc itself: a user's
        ``queue.py`` or ``types.py`` must not replace a module of the standard library.
        """
        safe = ("-P",) if sys.version_info >= (3, 11) else ()
        command = (sys.executable, *safe, "-m", "qsgd_hpc.cli")
        script = Path(sysconfig.get_path("scripts")) / "qsgd-hpc"
        return cls(sys.executable, (str(script),) if not safe and script.is_file() else command)


def render_script(request: JobRequest, site: Site, tools: Tools) -> str:
    """Return the job script for a request that :func:`validate.fill` has filled.

    Raises:
        UsageError: a value cannot stand on a directive line.
    """
    template = _environment().get_template(f"{site.scheduler}.sh.j2")
    fields = _fields(request, site)
    return template.render(
        site=site,
        request=request,
        walltime=None if request.walltime_min is None else clock(request.walltime_min),
        workdir=str(request.workdir or Path.cwd()),
        directives=[_formatted(line, fields, tools)[0] for line in site.directives],
        variables=_variables(request, site, fields),
        launcher=_launcher(request, site, fields, tools),
        command=_command(request, site, tools),
    )


def _fields(request: JobRequest, site: Site) -> dict[str, int]:
    """Return what {name} stands for in launcher.argv and directives."""
    per_node = request.ranks_per_node or 1
    # A node that is not full keeps the shares of a full one: each rank stays beside its GPU.
    shares = max(per_node, site.gpus, 1)
    depth = max(1, (site.cores or 1) // shares)
    threads_per_core = (site.hwthreads or 1) // (site.cores or 1) or 1
    return {
        "nodes": request.nodes,
        "ranks": request.ranks,
        "ranks_per_node": per_node,
        "gpus": site.gpus,
        "depth": depth,
        "cpus_per_rank": depth * threads_per_core,
    }


def _formatted(word: str, fields: dict[str, int], tools: Tools) -> list[str]:
    if word == "{qsgd_hpc}":
        return list(tools.qsgd_hpc)
    return [word.format(**fields, python=tools.python, qsgd_hpc=shlex.join(tools.qsgd_hpc))]


def _variables(request: JobRequest, site: Site, fields: dict[str, int]) -> dict[str, str]:
    """Return the job's own variables; the user's have the last word."""
    threads = {"OMP_NUM_THREADS": str(fields["depth"])} if site.cores else {}
    gpus = {}
    if site.gpu and site.gpu.set_in == "script":
        gpus = {site.gpu.variable: ",".join(map(str, site.gpu.order))}
    return {**gpus, **threads, **site.env, **request.env}


def _launcher(
    request: JobRequest, site: Site, fields: dict[str, int], tools: Tools
) -> list[list[str]]:
    """Return the launcher's words, one list for each line of the script."""
    first = [word for raw in site.launcher_argv for word in _formatted(raw, fields, tools)]
    passed = [
        [word.format(key=key, value=value) for word in site.launcher_env_argv]
        for key, value in _variables(request, site, fields).items()
    ]
    lines = [first, *(words for words in passed if words)]
    if site.gpu and site.gpu.set_in == "rank" and site.gpu.variable not in request.env:
        lines.append(["env", f"{site.gpu.variable}={','.join(map(str, site.gpu.order))}"])
    return lines


def _command(request: JobRequest, site: Site, tools: Tools) -> list[str]:
    script = str((request.workdir or Path.cwd()) / request.script)
    words = [script, *request.script_args]
    if request.script.suffix == ".py" or request.python:
        words.insert(0, request.python or site.python or tools.python)
    if ":" in words:
        # A lone colon separates programs for every mpiexec; inside one word it does not.
        return ["/bin/bash", "-c", f"exec {shlex.join(words)}"]
    return words


@functools.cache
def _environment() -> jinja2.Environment:
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
    """Return the value if a directive line can carry it as it is; no quoting exists there."""
    text = str(value)
    if not re.fullmatch(r"[ -~]+", text) or re.search(r"[\"'\\`$#]", text):
        raise UsageError(
            f"{text!r} cannot stand on a scheduler's directive line: no quotes, $, #, backslashes, "
            "line breaks or letters beyond ASCII there."
        )
    return text
