"""Rows that labs collect: the median of each size, and nothing of the site."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from qsgd_hpc.scaling.define.study import plan
from qsgd_hpc.scaling.report import report as reports
from qsgd_hpc.scaling.report.cli import report
from qsgd_hpc.scaling.report.tables import COLUMNS
from tests.scaling.samples import amdahl, metered, study, written

WOBBLE = {1: 0.97, 2: 1.0, 3: 1.02}


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are of the records; each plot takes a second."""
    monkeypatch.setattr(reports, "_plots", lambda *_: ["plot"])


def reported(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(report, [str(folder), *options])


def test_a_row_is_the_median_of_its_repeats_and_studies_add_up(tmp_path: Path) -> None:
    whole = study(nodes=(1, 2), bits=(32, 4), repeats=3)
    points = plan(whole)
    found = [metered(p, speed=amdahl(p) * WOBBLE[p.repeat]) for p in points]
    written(tmp_path / "study", whole, found)
    target = tmp_path / "speeds.csv"
    small = study(nodes=(1,), bits=(32,), repeats=1)
    written(tmp_path / "small", small, [metered(p, speed=1.0) for p in plan(small)])
    for folder, system in (("study", "Polaris"), ("small", "Frontier")):
        done = reported(tmp_path / folder, "--rows", str(target), "--system", system)
        assert done.exit_code == 0, done.output
    with target.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert tuple(table[0]) == COLUMNS
    assert [row["system"] for row in table] == ["Polaris"] * 3 + ["Frontier"]
    sizes = [(int(row["nodes"]), int(row["bits"])) for row in table[:3]]
    assert sizes == [(1, 32), (2, 32), (2, 4)]
    for row, (nodes, bits) in zip(table, sizes, strict=False):
        same = [p for p in points if (p.nodes, p.bits) == (nodes, bits)]
        speeds = [amdahl(p) * WOBBLE[p.repeat] for p in same]
        assert float(row["throughput_median"]) == statistics.median(speeds)
        assert row["repeats"] == "3"
        assert row["unit"].endswith("/s")


def test_runs_in_other_bits_have_no_rows(tmp_path: Path) -> None:
    """As of a script that always compresses."""
    whole = study(nodes=(1, 2), bits=(32, 4), repeats=1)
    written(tmp_path / "study", whole, [metered(p, speed=1.0, nmse=0.01) for p in plan(whole)])
    target = tmp_path / "speeds.csv"
    assert reported(tmp_path / "study", "--rows", str(target)).exit_code == 0
    with target.open(newline="") as file:
        assert [(row["ranks"], row["bits"]) for row in csv.DictReader(file)] == [
            ("1", "32"),
            ("2", "4"),
        ]


def test_a_last_row_without_a_newline_stays_a_row_of_its_own(tmp_path: Path) -> None:
    whole = study(nodes=(1,), bits=(32,), repeats=1)
    written(tmp_path / "study", whole, [metered(p, speed=1.0) for p in plan(whole)])
    target = tmp_path / "speeds.csv"
    for _ in range(2):
        assert reported(tmp_path / "study", "--rows", str(target)).exit_code == 0
        target.write_text(target.read_text().removesuffix("\n"))
    with target.open(newline="") as file:
        rows = list(csv.reader(file))
    assert [len(row) for row in rows] == [len(COLUMNS)] * 3


def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    whole = study(nodes=(1,), bits=(32,), repeats=1)
    written(tmp_path / "study", whole, [metered(p, speed=1.0) for p in plan(whole)])
    target = tmp_path / "notes.csv"
    target.write_text("a,b\n1,2\n")
    done = reported(tmp_path / "study", "--rows", str(target))
    assert "its first line must be" in str(done.exception)
    assert target.read_text() == "a,b\n1,2\n"
    assert "--system names the machine" in reported(tmp_path / "study", "--system", "x").output
