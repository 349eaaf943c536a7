"""Tests here start real MPI ranks, once per Python in QSGD_TEST_PYTHON (and so per MPI).

QSGD_TEST_PYTHON is a colon-separated list of interpreters, each with an MPI of its own; the default
is the one that runs pytest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qsgd_hpc.launch.cluster import Network
from qsgd_hpc.launch.cluster.keeper import trial
from qsgd_hpc.launch.cluster.links import ClusterError
from tests.processes import without_settings

ROOT = Path(__file__).parents[2]
LONGEST_ON_RANKS_S = 120


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "python" in metafunc.fixturenames:
        pythons = os.environ.get("QSGD_TEST_PYTHON", sys.executable).split(os.pathsep)
        if metafunc.definition.get_closest_marker("one_mpi"):
            pythons = pythons[:1]  # long ones, in which nothing depends on the MPI
        marked = [
            pytest.param(path, marks=[pytest.mark.second_mpi] if number else [])
            for number, path in enumerate(pythons)
        ]
        metafunc.parametrize("python", marked, ids=lambda path: Path(path).parents[1].name)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("serial")


@pytest.fixture
def hosts_of_their_own() -> None:
    """Skip, saying what is missing, where this machine gives a run no hosts of its own."""
    try:
        trial(Network(10**9), 2)
    except ClusterError as error:
        pytest.skip(str(error))


@pytest.fixture
def run_ranks(python: str, tmp_path: Path):
    """Return run(ranks, *command) that starts ranks through the command line."""

    def run(
        ranks: int, *command: str, timeout_s: float = 240, cwd: Path = ROOT, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-m", "qsgd_hpc", "run", "-np", str(ranks), *command],
            cwd=cwd,
            env={**without_settings(), **environ},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run


@pytest.fixture
def run_suite(run_ranks, python: str, tmp_path: Path):
    """Return run(ranks, folder, *options) that has every rank run the tests of a folder."""

    def run(
        ranks: int, folder: str, *options: str, timeout_s: float = 1200, **environ: str
    ) -> None:
        command = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.ranks")
        # Less than this test has: the ranks are to say themselves where one of them hangs.
        command += ("--timeout", str(LONGEST_ON_RANKS_S))
        environ = {"RANKS_FOLDER": str(tmp_path), **environ}
        done = run_ranks(ranks, *command, folder, *options, timeout_s=timeout_s, **environ)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-9000:]
        # Every rank ran, and none ran nothing.
        assert len(re.findall(r"\d{2} passed", done.stdout)) == ranks, done.stdout[-2000:]

    return run
