"""The number of ranks that a launcher has started, from the variables that it sets. Pure.

A claim is exact (``PMI_SIZE=4``) or a lower bound (``PALS_RANKID=3``: four
ranks or more), because some launchers set the rank but not the number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = [
    "OF_ONE_RANK",
    "OWN",
    "Claim",
    "broken_claim",
    "claims",
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
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
    "SLURM_PROCID",
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
    return [claim for claim in found if not claim.source.startswith(OWN)] + [
        claim for claim in found if claim.source.startswith(OWN)
    ]


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
