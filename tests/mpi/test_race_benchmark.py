"""The race trains on real ranks, goes on from what it has left, and tells who was there when."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.one_mpi
RACE = Path(__file__).parents[2] / "benchmarks" / "race"


@pytest.mark.parametrize("track", ["shakespeare", "ptb"])
def test_a_race_goes_on_and_is_told(run_ranks, tmp_path, track):
    path = tmp_path / "race.json"

    def run(*more, seeds=1):
        words = ("--track", track, "--json", str(path), "--steps", "20", "--seeds", str(seeds))
        done = run_ranks(2, str(RACE / "train.py"), *words, *more)
        assert done.returncode == 0, done.stderr
        return json.loads(path.read_text())

    first = run("--only", "EDEN 3 bit")["rows"]
    assert [row["what"] for row in first] == ["DDP bf16", "EDEN 3 bit"]
    assert len(first[0]["losses"]) == 3  # the base goes on beyond the target
    rows = run("--only", "EDEN 3 bit", seeds=2)["rows"]
    assert rows[:2] == first
    assert [(row["what"], row["seed"]) for row in rows[2:]] == [("DDP bf16", 1), ("EDEN 3 bit", 1)]
    times = run("--times", "memory", seeds=2)["times_s"]["memory"]
    assert {len(samples) for samples in times.values()} == {11}
    told = subprocess.run(
        [sys.executable, str(RACE / "report.py"), str(path)], capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    assert "DDP bf16's after 20 steps" in told.stdout
    assert told.stdout.count("EDEN 3 bit") == 1
