"""Find the MPI library that mpi4py will load, and the mpiexec that belongs to it."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.claims import NO_MPI, no_mpi

__all__ = [
    "Family",
    "Launcher",
    "Library",
    "end_with_parent",
    "family_of",
    "find_launcher",
    "find_library",
    "prepare_mpiexec",
    "raise_file_limit",
]

PROBE_TIMEOUT_S = 60.0

# Run in a separate process: the launcher must not load MPI, especially not in a batch job.
_PROBE = """
import json, runpy, sys, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
loaded = runpy.run_path(sys.argv[1])
path = loaded["loaded_library"]()
text = MPI.Get_library_version().strip(" \\0")
print(json.dumps([text, MPI.get_vendor(), path and str(path), loaded["pip_package"](path)]))
"""
_CLAIMS = Path(__file__).with_name("claims.py")


class Family(str, Enum):
    """Launchers with the same options."""

    HYDRA = "Hydra"
    INTEL = "Intel MPI"
    OPEN_MPI = "Open MPI"
    PALS = "PALS"
    SRUN = "srun"


@dataclass(frozen=True)
class Library:
    """The MPI library in use: its name, vendor, path, and pip's package."""

    text: str
    vendor: str
    version: tuple[int, ...]
    path: Path | None
    package: str | None = None

    @property
    def name(self) -> str:
        """Vendor and version, such as ``MPICH 5.0.2``."""
        return f"{self.vendor} {'.'.join(map(str, self.version))}"

    @property
    def families(self) -> tuple[Family, ...]:
        """The launchers that can start ranks of this library."""
        if self.vendor == "Open MPI":
            return (Family.OPEN_MPI, Family.SRUN)
        return (Family.HYDRA, Family.INTEL, Family.PALS, Family.SRUN)


@dataclass(frozen=True)
class Launcher:
    """A launcher program, its family and the first line of its ``--version``."""

    family: Family
    path: Path
    version: str


def find_library(python: str = sys.executable, environ: Mapping[str, str] | None = None) -> Library:
    """Find the MPI that mpi4py loads, in a separate process.

    Raises:
        UsageError: mpi4py is missing, or finds no MPI library.
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, str(_CLAIMS)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"loading MPI took more than {PROBE_TIMEOUT_S:g} s; try: python -c "
            "'from mpi4py import MPI'"
        ) from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        remedy = no_mpi(os.environ if environ is None else environ)
        raise UsageError(f"no MPI library can be loaded ({reason}); {remedy}")
    text, (vendor, version), path, package = json.loads(done.stdout.splitlines()[-1])
    return Library(text, vendor, tuple(version), Path(path) if path else None, package)


def family_of(version_text: str) -> Family | None:
    """Return a launcher's family from the output of ``--version``.

    >>> family_of("HYDRA build details:").value
    'Hydra'
    """
    for pattern, family in (
        (r"Intel\(R\) MPI", Family.INTEL),
        (r"HYDRA", Family.HYDRA),
        (r"Open MPI|OpenRTE|PRTE|prterun", Family.OPEN_MPI),
        (r"PALS|\bpals\b|Cray|HPE", Family.PALS),
        (r"^slurm", Family.SRUN),
        (r"^mpiexec version", Family.PALS),
    ):
        if re.search(pattern, version_text, re.MULTILINE):
            return family
    return None


def _probe_launcher(path: Path) -> Launcher | None:
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = (done.stdout + done.stderr).strip()
    family = family_of(text)
    return None if family is None else Launcher(family, path, _short(text))


def _short(text: str) -> str:
    version = re.search(r"^\s*Version:\s*(\S+)", text, re.MULTILINE)
    return f"Hydra {version[1]}" if version else text.splitlines()[0].strip()


def _candidates(library: Library, environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield possible launchers, the library's own first; targets of wrappers are not resolved."""
    folders = []
    if library.path is not None:
        # lib/libmpi.so, lib/x86_64-linux-gnu/libmpi.so and Intel's lib/release/libmpi.so
        folders = [parent / "bin" for parent in list(library.path.parents)[1:4]]
    folders.append(Path(sys.executable).parent)
    search = os.pathsep.join([*map(str, folders), environ.get("PATH", os.defpath)])
    seen = set()
    for folder in search.split(os.pathsep):
        for name in ("mpiexec", "mpiexec.hydra", "mpirun"):
            found = shutil.which(name, path=folder) if folder else None
            if found and Path(found) not in seen:
                seen.add(Path(found))
                yield Path(found)


def find_launcher(library: Library, environ: Mapping[str, str] | None = None) -> Launcher:
    """Find the launcher of a library: its own prefix, then PATH, then srun in a Slurm job.

    Raises:
        UsageError: there is none, or only one of another MPI.
    """
    environ = os.environ if environ is None else environ
    others = []
    for path in _candidates(library, environ):
        launcher = _probe_launcher(path)
        if launcher is not None and launcher.family in library.families:
            return launcher
        others.append(f"{path} ({launcher.version if launcher else 'unknown'})")
    srun = shutil.which("srun", path=environ.get("PATH", os.defpath))
    if srun and environ.get("SLURM_JOB_ID"):
        launcher = _probe_launcher(Path(srun))
        if launcher is not None:
            return launcher
    where = f" in {library.path}" if library.path else ""
    if others:
        raise UsageError(
            f"mpi4py uses {library.name}{where}, but the mpiexec found is another MPI's: "
            f"{', '.join(others[:3])}. Ranks started by it could not connect to each other. "
            f"Put the bin folder of {library.vendor} first in PATH, or point MPI4PY_LIBMPI to "
            "the libmpi of that mpiexec."
        )
    raise UsageError(f"no mpiexec found for {library.name}{where}; {NO_MPI}")


_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def prepare_mpiexec() -> None:
    """Prepare a forked process for the exec of mpiexec."""
    # The ranks' supervisors inherit this: MPICH's mpiexec reports a death by SIGUSR1, which may
    # arrive before a supervisor has a handler.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    end_with_parent()


def raise_file_limit(files: int) -> None:
    """Raise this process's limit of open files, as far as allowed, to so many and 256 others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
