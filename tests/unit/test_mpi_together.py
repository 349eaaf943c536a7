"""Ranks that a launcher has started together, but whose MPI believes each to be alone."""

from __future__ import annotations

import pytest

from qsgd_hpc._mpi import _require_together
from qsgd_hpc.errors import UsageError


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_lonely_ranks_of_many_are_an_error_with_the_remedy(name: str) -> None:
    with pytest.raises(UsageError, match=rf"started 4 ranks \({name}\).*--mpi=pmi2"):
        _require_together(1, "MPICH", {name: "4"})


def test_the_nearest_launcher_counts() -> None:
    _require_together(1, "MPICH", {"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"})
    _require_together(1, "MPICH", {})
    _require_together(4, "MPICH", {"SLURM_STEP_NUM_TASKS": "4"})
