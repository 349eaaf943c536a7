"""The MPI library that ranks load, and the mpiexec that starts them."""

from __future__ import annotations

import shutil
from pathlib import Path

from qsgd_hpc.checkup.finding import Finding, fault, note, ok
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.sites import find_host
from qsgd_hpc.launch.mpi import REMEDY, Library, find_launcher, find_library

__all__ = ["mpi"]


def mpi() -> list[Finding]:
    """Find the MPI library and its launcher."""
    try:
        library = find_library()
    except UsageError as error:
        return [fault("MPI", str(error), f"Run {REMEDY}.")]
    where = f", {library.path}" if library.path else ""
    return [ok("MPI", f"{library.name}{where}"), *_launcher(library)]


def _launcher(library: Library) -> list[Finding]:
    try:
        launcher = find_launcher(library)
    except UsageError as error:
        if find_host().schedulers:
            remedy = "Jobs use the site's launcher; `qsgd-hpc run` needs one here."
            return [note("launcher", str(error), remedy)]
        return [fault("launcher", str(error), "`qsgd-hpc run` cannot start ranks without it.")]
    found = [ok("launcher", f"{launcher.version}, {launcher.path}")]
    first = shutil.which("mpiexec")
    if first and Path(first).resolve() != launcher.path.resolve():
        found.append(
            note(
                "launcher",
                f"{first} is first on PATH and does not belong to {library.name}",
                f"Start ranks with `qsgd-hpc run` or {launcher.path}.",
            )
        )
    return found
