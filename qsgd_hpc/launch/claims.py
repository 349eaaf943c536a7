"""The number of ranks that a launcher has started, from the variables that it sets. Pure.

A claim is exact (``PMI_SIZE=4``) or a lower bound (``PALS_RANKID=3``: four
ranks or more), because some launchers set the rank but not the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["OWN", "Claim", "broken_claim", "claims", "rank_of", "under_pmi2_of_slurm"]

# What `qsgd-hpc run` and the job scripts of `qsgd-hpc submit` set in every rank.
OWN = "QSGD_RANKS"

HYDRA = "mpiexec of the MPICH family"
OPEN_MPI = "mpiexec of Open MPI"
SRUN = "srun"
PALS = "mpiexec of PALS"
PMIX = "a PMIx launcher"

# (launcher, variable, what to add to its number, whether that is all ranks or a part of them). The
# nearest to the process first: srun also starts the daemons of the other launchers, so what it
# says stands in their ranks' environments, too.
_TOLD = (
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
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
    "SLURM_PROCID",
)
# Numbers from here on mean no step that srun started: the batch script, an interactive shell.
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
        environ: of the process.
        is_open_mpi: the family of the process's MPI: of two nested launchers, that of its own MPI
            is the inner one.
    """
    found = list(_claims(environ))
    if not is_open_mpi:
        found.sort(key=lambda claim: not claim.source.startswith("PMI_SIZE"))
    return [claim for claim in found if not claim.source.startswith(OWN)] + [
        claim for claim in found if claim.source.startswith(OWN)
    ]


def _claims(environ: Mapping[str, str]) -> Iterator[Claim]:
    for launcher, name, more, exact in (*_TOLD, ("qsgd-hpc", OWN, 0, True)):
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
    """Return the launcher behind PMI, which many launchers use."""
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

    Claims after the first exact one are of an outer launcher, which started another program:
    ``mpiexec -n 1`` in a shell that srun started. But this package's own claim is about this
    job in any case.
    """
    own = [claim for claim in found if claim.source.startswith(OWN)]
    inner = [claim for claim in found if claim not in own]
    exact = next((i for i, claim in enumerate(inner) if claim.exact), len(inner))
    return next((c for c in (*inner[: exact + 1], *own) if c.ranks > size), None)


def rank_of(environ: Mapping[str, str]) -> int | None:
    """Return this process's rank by its launcher's numbering."""
    return next((n for name in _RANKS if (n := _number(environ, name)) is not None), None)
