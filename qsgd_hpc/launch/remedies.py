"""Remedies for a launcher and an MPI that are incompatible. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from qsgd_hpc.launch.claims import HYDRA, OPEN_MPI, OWN, PALS, SRUN, Claim

__all__ = ["NO_MPI", "LoadedMpi", "leave_pip_out", "no_mpi", "not_connected"]

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
