"""A short form of ``make soak``: random collectives on four ranks, and on a tree of many."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "soak" / "soak.py"
SECONDS = float(os.environ.get("SOAK_SECONDS", "20"))


def soak(run_ranks, python, ranks):
    done = run_ranks(
        ranks, python, str(SOAK), "--seconds", str(SECONDS), timeout_s=SECONDS + 240,
        QSGD_RANKS_PER_NODE="4", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "rounds right" in done.stdout
    return done.stdout


def test_random_collectives_are_right_and_leave_no_memory_behind(run_ranks, python):
    assert soak(run_ranks, python, 4).count("since it was warm") == 4


@pytest.mark.one_mpi
def test_random_collectives_are_right_on_16_nodes_of_4(run_ranks, python):
    soak(run_ranks, python, 64)  # of which there are too few rounds in this time to judge memory
