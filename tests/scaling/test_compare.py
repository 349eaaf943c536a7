"""Two studies beside each other: no verdict inside the noise, and what else differs is said."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.analysis.results import CaseAnalysis
from qsgd_hpc.scaling.define.study import plan
from qsgd_hpc.scaling.report.cli import report
from qsgd_hpc.scaling.report.compare import compare, section, summary
from qsgd_hpc.scaling.report.report import context, render
from qsgd_hpc.scaling.report.terminal import print_comparison, print_result
from tests.scaling.analysis_samples import case_analysis, report_of
from tests.scaling.samples import amdahl, metered, study, written

NAMES = ("now", "before")


def faster(case: CaseAnalysis, factor: float) -> CaseAnalysis:
    """Return the case with every throughput multiplied, in its table and its runs."""
    table, runs = case.table.copy(), case.runs.copy()
    for frame in (table, runs):
        for column in ("throughput", "throughput_lo", "throughput_hi"):
            frame[column] = factor * frame[column]
    return dataclasses.replace(case, table=table, runs=runs)


@pytest.mark.parametrize(
    ("factor", "word"), [(1.2, "faster"), (0.8, "slower"), (1.001, "same"), (1.0, "same")]
)
def test_a_difference_is_said_only_outside_of_the_noise(factor, word):
    base = case_analysis(nodes=(1, 2))
    found = compare(report_of(faster(base, factor)), report_of(base), NAMES)
    assert [pair.verdict.word for pair in found.pairs] == [word] * 4
    for pair in found.pairs:
        ratio = pair.verdict.ratio
        assert ratio.value == pytest.approx(factor)
        assert ratio.low < factor < ratio.high
    assert summary(found) == f"now compared with before: 4 {word}"


@pytest.mark.parametrize("factor", [1.0, 1.06, 3.0, 0.5])
def test_single_runs_have_no_verdict(factor):
    base = case_analysis(nodes=(2,), bits=(32,), repeats=1)
    (pair,) = compare(report_of(faster(base, factor)), report_of(base), NAMES).pairs
    assert (pair.verdict.word, pair.verdict.ratio.low) == ("once", None)
    shown = section(compare(report_of(faster(base, factor)), report_of(base), NAMES))
    assert shown["rows"][0]["interval"] == "one run"
    assert shown["rows"][0]["verdict"] == "undecided"
    assert shown["summary"] == "now compared with before: 1 measured once"


def test_of_strong_and_weak_scaling_only_rows_of_the_same_batch_are_compared():
    base = report_of(case_analysis(nodes=(1, 2)))
    weak = dataclasses.replace(base, study=study(mode="weak"))
    found = compare(base, weak, NAMES)
    assert [pair.row["ranks"] for pair in found.pairs] == [1]
    assert found.alone == (3, 3)
    assert found.differences == (("Mode", "strong scaling", "weak scaling"),)


def test_only_what_both_measured_is_compared_and_the_rest_is_counted():
    mine = report_of(case_analysis(nodes=(1, 2, 4)), case_analysis("other", nodes=(1,)))
    theirs = report_of(case_analysis(nodes=(2, 8)))
    found = compare(mine, theirs, NAMES)
    assert {(p.case.workload, p.row["ranks"]) for p in found.pairs} == {("train", 2)}
    assert found.alone == (5, 3)
    assert "5 rows only in now. 3 rows only in before." in section(found)["note"]


def test_what_differs_in_the_origins_is_named():
    case = case_analysis(nodes=(1, 2))
    found = compare(report_of(case, commit="aaa"), report_of(case, commit="bbb"), NAMES)
    assert found.differences == (("Code", "aaa", "bbb"),)


def test_other_arguments_of_the_trainings_are_named():
    case = case_analysis(nodes=(1, 2))
    other = report_of(case)
    (program,) = other.study.programs
    program = dataclasses.replace(program, args=("--model", "resnet18"))
    trained = dataclasses.replace(other.study, programs=(program,))
    other = dataclasses.replace(other, study=trained)
    (difference,) = compare(report_of(case), other, NAMES).differences
    assert difference == ("Arguments", "train: none", "train: --model resnet18")


def test_nothing_in_common_and_different_units_are_errors_with_a_remedy():
    mine = report_of(case_analysis("one", nodes=(1,)))
    with pytest.raises(UsageError, match="no point in common") as caught:
        compare(mine, report_of(case_analysis("two", nodes=(1,))), NAMES)
    assert "before: two (torch), batch 128" in str(caught.value)
    words = report_of(case_analysis("one", nodes=(1,), unit="words"))
    with pytest.raises(UsageError, match="Record the same unit"):
        compare(mine, words, NAMES)


def test_the_comparison_stands_in_page_and_markdown():
    case = case_analysis("</script><b>|", nodes=(1, 2))
    mine = report_of(case, commit="<i>a|b")
    found = compare(mine, report_of(case), NAMES)
    filled = context(mine, [["plot"]], found)
    html = render("report.html.j2", filled)
    assert 'id="comparison"' in html and "<i>a" not in html and "</script><b>" not in html
    assert "now compared with before: 4 same" in html
    markdown = render("report.md.j2", filled)
    assert "| Code | <i>a\\|b | 0123456789ab |" in markdown
    assert "| 2 nodes, 4 bit |" in markdown


@pytest.mark.full
def test_the_command_compares_and_leaves_the_studys_own_report_alone(tmp_path: Path):
    whole = study(nodes=(2,), bits=(32,), repeats=2)
    for name, factor in (("now", 1.5), ("before", 1.0)):
        wobble = {1: 0.99, 2: 1.01}
        found = [metered(p, speed=factor * amdahl(p) * wobble[p.repeat]) for p in plan(whole)]
        written(tmp_path / name, whole, found)
    done = CliRunner().invoke(
        report, [str(tmp_path / "now"), "--vs", str(tmp_path / "before")], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "now compared with before: 1 faster" in done.output
    assert (tmp_path / "now" / "vs-before" / "report.html").exists()
    assert not (tmp_path / "now" / "report.html").exists()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_tables_fit_the_terminal(tmp_path: Path, width: int):
    screen = Console(width=width)
    whole = report_of(case_analysis(nodes=(1, 2)), case_analysis("other", nodes=(1, 2)))
    with screen.capture() as caught:
        print_result(screen, whole, tmp_path / "report.html")
    rows = [ln for ln in caught.get().splitlines() if re.match(r" +[12]  +(fp32|[48] bit)", ln)]
    assert len(rows) == 2 * 4
    assert max(len(row.rstrip()) for row in rows) <= width
    assert all("…" not in row and "×" in row for row in rows)
    assert all("MB" in row or "kB" in row for row in rows if " 2 " in row) == (width >= 80)
    with screen.capture() as caught:
        print_comparison(screen, compare(whole, whole, NAMES), tmp_path / "report.html")
    assert caught.get().count("same") == 8 + 1
    assert max(map(len, (ln.rstrip() for ln in caught.get().splitlines()[3:-2]))) <= width
