"""The benchmark of accuracies trains on real ranks, and goes on from what it has left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.one_mpi
TRAIN = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "train.py"


@pytest.fixture
def train(run_ranks, tmp_path):
    """Return a function that trains small networks on noise: its job, and its record."""

    def run(task, *only, epochs="1"):
        path = tmp_path / "accuracy.json"
        patterns = [word for pattern in only for word in ("--only", pattern)]
        small = ("--images", "128", "--width", "2", "--epochs", epochs, "--json", str(path))
        done = run_ranks(2, str(TRAIN), "--task", task, *small, *patterns)
        return done, json.loads(path.read_text())

    return run


def test_an_interrupted_run_goes_on(train):
    done, first = train("mnist", "qsgd 4 bit", "sign*")
    assert done.returncode == 0, done.stderr
    done, record = train("mnist", "fp32", "sign*")
    assert done.returncode == 0, done.stderr
    exact, coded, sign, fed = rows = record["rows"]
    whats = ["fp32", "qsgd 4 bit", "sign (1 bit)", "sign (1 bit), feedback"]
    assert [row["what"] for row in rows] == whats
    assert rows[1:] == first["rows"]
    assert all(what in done.stdout for what in whats[:3])
    assert exact["wire_bytes"] > 7 * coded["wire_bytes"] > 7 * 3 * sign["wire_bytes"]
    assert fed["wire_bytes"] == pytest.approx(sign["wire_bytes"], rel=0.1)
    assert exact["nmse"] is None
    assert 0.01 < coded["nmse"] < 0.1 < sign["nmse"] < 1
    refused, kept = train("mnist", "fp32", epochs="2")
    assert refused.returncode != 0
    assert "is of a run with epochs 1, this is one with 2" in refused.stderr
    assert kept == record


def test_the_deep_network_trains(train):
    done, record = train("resnet34", "bf16")
    assert done.returncode == 0, done.stderr
    (row,) = record["rows"]
    assert (row["steps"], row["diverged"], row["nmse"]) == (4, False, None)
    assert 0 <= row["test_accuracy"] < 0.5
