"""Report a job that needs this package in a Python without it, before the job is queued."""

from __future__ import annotations

import ast
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.request.mpi_fit import imported, python_at, python_of
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.rules import PLAIN_BITS

__all__ = ["noted", "package_faults"]

PROBE_TIMEOUT_S = 20.0  # a Python on a busy shared file system needs seconds to start
# Without importing it, as that may need modules of the job. A folder of this name has no origin.
_PROBE = (
    "import importlib.util; spec = importlib.util.find_spec('qsgd_hpc'); "
    "print('missing' if spec is None or spec.origin is None else 'found')"
)
_CHOICES = "--venv, --conda or --python"


def package_faults(request: JobRequest, site: Site) -> list[str]:
    """Return the fault of a Python on this machine that lacks the package that the job needs."""
    need, python = _need(request), python_at(request, site)
    if need is None or python is None or _is_of_site(request, site):
        return []
    if request.modules or _has_module(request, site) or _has_package(request, site, python):
        return []
    return [
        f"{need} needs qsgd-hpc, which is not installed for {python}. Use `{python} -m pip install "
        f"qsgd-hpc`, or select another Python by {_CHOICES}."
    ]


def noted(request: JobRequest, site: Site) -> Site:
    """Return the site, with a remark if the job needs the package in the site's own Python."""
    if not _is_of_site(request, site) or _has_module(request, site) or _need(request) is None:
        return site
    python = python_of(request, site)
    if python is not None and _has_package(request, site, python):
        return site
    setup = f" ({'; '.join(site.setup)})" if site.setup else ""
    text = (
        f"the job runs {site.name}'s {site.python}{setup}, not {sys.executable}: install qsgd-hpc "
        f"for it, or select another Python by {_CHOICES}."
    )
    return dataclasses.replace(site, remarks=(*site.remarks, text))


def _is_of_site(request: JobRequest, site: Site) -> bool:
    """Return whether the job's Python is one that the profile names, on nodes of a batch site."""
    chosen = request.python or request.venv or request.conda
    return not chosen and site.scheduler != "local" and site.python is not None


def _has_module(request: JobRequest, site: Site) -> bool:
    """Return whether the job loads a module of this package, as recipes/modules provides."""
    return any("qsgd" in line for line in (*site.setup, *request.modules))


def _need(request: JobRequest) -> str | None:
    """Return what cannot do without the package in the job's Python, or None."""
    if not request.is_python:
        return None
    bits, weight_bits = (request.env.get(name) for name in ("QSGD_BITS", "QSGD_WEIGHT_BITS"))
    if bits and bits != str(PLAIN_BITS):
        return f"--bits {bits}"
    if weight_bits:
        return f"--weight-bits {weight_bits}"
    if request.horovod:
        return "--horovod"
    script = (request.workdir or Path.cwd()) / request.script
    return str(request.script) if _imports_package(script) else None


def _imports_package(script: Path) -> bool:
    """Return whether a script imports the package at its top level, outside of ``try``."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    always: list[ast.stmt] = [
        each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)
    ]
    names = (name for level, name in imported(ast.Module(always, [])) if not level)
    return any(name.partition(".")[0] == "qsgd_hpc" for name in names)


def _has_package(request: JobRequest, site: Site, python: str) -> bool:
    """Return whether a Python finds the package from the script's folder; True if unknown."""
    path = {**os.environ, **site.env, **request.env}.get("PYTHONPATH", "")
    folder = ((request.workdir or Path.cwd()) / request.script).parent
    return python == sys.executable or _finds(python, path, folder)


def _finds(python: str, path: str, folder: Path) -> bool:
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return True
    return done.stdout.split()[-1:] != ["missing"]
