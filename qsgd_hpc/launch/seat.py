"""A rank's place in its launch, before there is an MPI to ask."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qsgd_hpc.launch.claims import claims
from qsgd_hpc.launch.place import LAUNCHERS
from qsgd_hpc.launch.supervise import slurm_tasks_here

__all__ = ["Seat", "seat_of"]

# What starts ranks on a host and is an ancestor of each of them there, where no variable of the
# launcher tells one launch from another.
_PROXIES = frozenset({"hydra_pmi_proxy", "pmi_proxy", "prted", "prterun", "orted", "mpirun"})


@dataclass(frozen=True)
class Seat:
    """Who this rank is.

    Attributes:
        launch: a word that the ranks of this launch on this host share, and no others.
        rank, ranks: among all.
        local_rank, local_size: among those of this host.
    """

    launch: str
    rank: int
    ranks: int
    local_rank: int
    local_size: int


def seat_of(environ: Mapping[str, str]) -> Seat | None:
    """Return the seat that a launcher has given this process; None if it does not tell all of it.

    The batch script of a Slurm job has no seat, though Slurm gives it a rank: it is in no step.
    """
    ranks = next((claim.ranks for claim in claims(environ) if claim.exact), None)
    launch = _launch(environ) if ranks else None
    tasks = slurm_tasks_here(dict(environ))
    for local_rank, rank, local_size, _ in LAUNCHERS.values():
        sizes = environ.get(local_size) or ("" if tasks is None else str(tasks))
        numbers = [environ.get(rank, ""), environ.get(local_rank, ""), sizes]
        if ranks and launch and all(text.isdigit() for text in numbers):
            own, local, size = map(int, numbers)
            return Seat(launch, own, ranks, local, size)
    return None


def _launch(environ: Mapping[str, str]) -> str | None:
    """Return what tells this launch from others on this host; None if nothing does."""
    for name in ("PMIX_NAMESPACE", "PALS_APID"):
        if environ.get(name):
            return _word(environ[name])
    if "MPI_LOCALRANKID" not in environ and environ.get("SLURM_STEP_ID"):
        return _word(environ.get("SLURM_JOB_ID", ""), environ["SLURM_STEP_ID"])
    proxy = _proxy()
    return None if proxy is None else _word(*proxy)


def _word(*parts: str) -> str:
    text = "\n".join((socket.gethostname(), str(os.getuid()), *parts))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _proxy() -> tuple[str, str] | None:
    """Return number and start of the nearest ancestor that starts ranks."""
    pid = os.getppid()
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/stat").read_text("utf-8", "surrogateescape")
        except OSError:
            return None
        # The name stands in parentheses and may hold any character.
        name, fields = text[text.index("(") + 1 : text.rindex(")")], text.rsplit(")", 1)[1].split()
        if name in _PROXIES:
            return str(pid), fields[19]
        pid = int(fields[1])
    return None
