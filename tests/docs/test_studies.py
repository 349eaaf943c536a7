"""The studies that docs/studies shows: each report is what the records beside it give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from qsgd_hpc.cli import cli
from qsgd_hpc.scaling.define.study import plan
from qsgd_hpc.scaling.store import StudyFolder, finished

STUDIES = Path(__file__).parents[2] / "docs" / "studies"
NAMES = sorted(file.parent.name for file in STUDIES.glob("*/study.json"))
# Each draws all plots, which takes long; this one has several cases.
GATE = "slurm"
ONE_IN_THE_GATE = [
    name if name == GATE else pytest.param(name, marks=pytest.mark.full) for name in NAMES
]


@pytest.mark.parametrize("name", ONE_IN_THE_GATE)
def test_the_report_is_what_the_records_give(name: str, tmp_path: Path) -> None:
    words = ["report", str(STUDIES / name), "-o", str(tmp_path)]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "REPORT.md").read_text()
    assert page == (STUDIES / name / "REPORT.md").read_text()
    shown = re.findall(r"!\[.*?\]\((.*?)\)", page)
    assert shown and all((STUDIES / name / plot).exists() for plot in shown)
    more = re.findall(r"`([^`]+)`", " ".join(re.findall("^More plots.*", page, re.M)))
    assert more and all((tmp_path / f"{plot}.pdf").exists() for plot in more)
    assert (tmp_path / "report.html").stat().st_size > 100_000
    assert (tmp_path / "networks-1.svg").exists() == (name == "networks")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_missing_and_nothing_was_measured_twice(name: str) -> None:
    folder = StudyFolder(STUDIES / name)
    attempts, torn = folder.attempts()
    done = finished(attempts)
    assert not torn and set(done) == {point.key for point in plan(folder.study())}
    assert len(attempts) == len(done)


def test_there_are_studies_to_show() -> None:
    assert {"shaped-1gbit", "slurm"} <= set(NAMES)
