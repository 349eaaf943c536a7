"""The results of the race in benchmarks/README.md and README.md are those of the records."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
REPORT = runpy.run_path(str(ROOT / "benchmarks" / "race" / "report.py"))
TRACKS = ("shakespeare", "ptb")
NETWORKS = {"100mbit": "100 Mb/s", "1gbit": "1 Gb/s"}
SHOWN = ("QSGD 8 bit", "QSGD 4 bit", "EDEN 3 bit", "DDP PowerSGD 2")


def record(track: str) -> dict:
    return json.loads((RESULTS / f"race-{track}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("track", TRACKS)
def test_the_table_of_a_track_is_that_of_its_record(track: str) -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert REPORT["table"](record(track)) in page


@pytest.mark.parametrize("track", TRACKS)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_headline_is_that_of_the_record(track: str, network: str) -> None:
    measured = record(track)
    speeds = [REPORT["speed"](measured, what, network) for what in SHOWN]
    row = f"| {measured['task']}, {NETWORKS[network]} | {' | '.join(speeds)} |"
    assert row in (ROOT / "README.md").read_text(encoding="utf-8")
