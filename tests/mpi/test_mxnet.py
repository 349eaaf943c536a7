"""MXNet in an environment of its own, which ``make test-mxnet`` builds and QSGD_TEST_MXNET names.

Nothing else runs there: MXNet needs a numpy that is too old for the other frameworks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qsgd_hpc import env
from tests.processes import without_settings

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("QSGD_TEST_MXNET", "")
MNIST = Path(env.get("QSGD_DATA") or "/nowhere") / "mnist"

needs_mxnet = pytest.mark.skipif(
    not PYTHON, reason="make test-mxnet builds the environment that this needs"
)


def run_ranks(ranks: int, *command: str) -> str:
    """Return what ranks in MXNet's environment print."""
    clean = without_settings()
    done = subprocess.run(
        [PYTHON, "-m", "qsgd_hpc", "run", "-np", str(ranks), *command],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@needs_mxnet
@pytest.mark.parametrize("bits", ["32", "4"])
def test_gluon_trains_mnist_on_two_ranks(bits):
    data = ["--data-dir", str(MNIST)] if MNIST.is_dir() else ["--images", "3000"]
    script = str(ROOT / "tests/horovod_scripts/mxnet_mnist.py")
    said = run_ranks(2, "--horovod", "--bits", bits, PYTHON, script, *data)
    ranks = re.findall(r"rank (\d): accuracy ([\d.]+), equal weights (\w+)", said)
    assert sorted(rank for rank, _, _ in ranks) == ["0", "1"]
    assert all(equal == "True" and float(right) > 0.95 for _, right, equal in ranks), said


@needs_mxnet
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_contract_holds_for_mxnet(ranks):
    modules = ["collectives", "collectives_errors", "collectives_sets", "mxnet"]
    suite = [f"tests/contract/test_{name}.py" for name in modules]
    # MXNet warns of its own age in many places.
    plugins = ["-p", "no:cacheprovider", "-p", "tests.ranks"]
    options = ["-q", *plugins, "-W", "ignore::DeprecationWarning"]
    said = run_ranks(ranks, PYTHON, "-m", "pytest", *options, *suite)
    assert len(re.findall(r"\d{2} passed", said)) == ranks, said[-2000:]


def test_where_mxnet_cannot_be_imported_the_error_says_what_to_install():
    command = [sys.executable, "-c", "import qsgd_hpc.mxnet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "It needs mxnet 1.9.1 and numpy 1.23.5 on Python 3.10 or 3.11" in done.stderr
