"""Terminal output of a study's results and of comparisons."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.results import CaseAnalysis
from qsgd_hpc.scaling.report.compare import HEADINGS as COMPARED
from qsgd_hpc.scaling.report.compare import Comparison, pair_cells, summary
from qsgd_hpc.scaling.report.networks import families
from qsgd_hpc.scaling.report.report import Report
from qsgd_hpc.scaling.report.tables import cells, headings

__all__ = ["console", "print_comparison", "print_result"]

# A terminal with fewer characters than NARROW gets no intervals. MEASURED exceeds every table.
NARROW, MEASURED = 56, 1000
COLOURS = {32: "default", 8: "bright_blue", 4: "yellow", 2: "magenta"}

VERDICTS = {"faster": "green", "slower": "red"}
# Columns that are left out, in this order, until the table fits the terminal; the report has all.
DROPPED = (
    *("link", "total_bytes", "communication", "nmse", "target", "step"),
    *("exposed", "compression", "step_bytes", "efficiency", "quality"),
)


def console() -> Console:
    """Return a console on standard output; a pipe or a log gets lines of 120 characters."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def print_result(console: Console, report: Report, page: Path) -> None:
    """Print each case's headline and table, the cautions, and the conclusion."""
    several = len(report.findings.cases) > 1
    if several:
        console.print()
        console.print(Text(report.findings.headline, style="bold"), soft_wrap=True)
    for case, found in zip(report.analysis.cases, report.findings.cases, strict=True):
        console.print()
        if several:
            console.print(Text(case.case.label, style="dim"), soft_wrap=True)
        console.print(Text(found.headline, style="bold"), soft_wrap=True)
        console.print()
        console.print(_result(console, case), soft_wrap=not console.is_terminal)
        for sentence in found.coded:
            console.print(Text(sentence), soft_wrap=not console.is_terminal)
        for verdict in case.break_even:
            question = f"Compress to {units.bits_name(verdict.bits)}?"
            answer = f"{verdict.verdict.capitalize()}. {verdict.reason}"
            console.print(Text(f"{question} {answer}"), soft_wrap=not console.is_terminal)
    console.print()
    for caution in (*report.findings.cautions, *report.origins.cautions, *report.incidents):
        console.print(Text(caution, style="dim"), soft_wrap=not console.is_terminal)
    console.print()
    for sentence in _conclusion(report):
        console.print(Text(sentence, style="bold"), soft_wrap=True)
    console.print(Text(f"Report: {page}", style="bold"), soft_wrap=True)


def _conclusion(report: Report) -> list[str]:
    """Return the conclusion: for several networks, one on each case; else the headline."""
    found = families(report.analysis.cases)
    lines = [f"{each.label}, {units.nodes_name(each.nodes)}: {each.sentence}" for each in found]
    return lines or [f"In short: {report.findings.headline}."]


def print_comparison(console: Console, comparison: Comparison, page: Path) -> None:
    """Print the compared rows of two studies, and the differences of their origins."""
    several = len({pair.case for pair in comparison.pairs}) > 1
    rows = [
        {k: Text(text) for k, text in pair_cells(pair, several=several).items()}
        for pair in comparison.pairs
    ]
    for pair, cells_of_pair in zip(comparison.pairs, rows, strict=True):
        cells_of_pair["verdict"].stylize(VERDICTS.get(pair.verdict.word, ""))
    table = _fitting(console, COMPARED, rows, dropped=("theirs", "ours", "interval"))
    console.print()
    console.print(Text(summary(comparison), style="bold"), soft_wrap=True)
    console.print()
    console.print(table, soft_wrap=not console.is_terminal)
    console.print()
    for label, ours, theirs in comparison.differences:
        console.print(Text(f"{label} differs: {ours} / {theirs}", style="dim"), soft_wrap=True)
    console.print(Text(f"Report: {page}", style="bold"), soft_wrap=True)


def _result(console: Console, case: CaseAnalysis) -> Table:
    rows = []
    for row in case.rows():
        text = cells(row, case)
        if text["speed_range"] and console.width >= NARROW:
            text["speed"] += f" ({text['speed_range']})"
        rows.append({k: Text(v) for k, v in text.items()})
        rows[-1]["bits"].stylize(COLOURS.get(row["bits"], "default"))
    sizes = [row["ranks"] for row in case.rows()]
    last = {i for i, (one, two) in enumerate(pairwise(sizes)) if one != two}
    return _fitting(console, headings(case), rows, dropped=DROPPED, ends=last)


def _fitting(
    console: Console,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Mapping[str, Text]],
    *,
    dropped: Sequence[str],
    ends: Container[int] = (),
) -> Table:
    """Return a table without the columns of `dropped`, first to last, that do not fit."""
    removed: set[str] = set()
    while True:
        shown = [(key, name) for key, name in columns if key not in removed]
        table = _table(shown, rows, ends)
        needed = Measurement.get(console, console.options.update_width(MEASURED), table).maximum
        more = [key for key in dropped if key in dict(shown)]
        if not more or needed <= console.width:
            return table
        removed.add(more[0])


def _table(
    columns: Sequence[tuple[str, str]], rows: Sequence[Mapping[str, Text]], ends: Container[int]
) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for key, name in columns:
        # Two lines for long names, because the numbers need the width.
        heading = Text(name.replace(" ", "\n", 1))
        left = key in ("bits", "place", "verdict")
        wraps = key == "place"
        table.add_column(heading, justify="left" if left else "right", no_wrap=not wraps)
    for number, row in enumerate(rows):
        table.add_row(*(row[key] for key, _ in columns), end_section=number in ends)
    return table
