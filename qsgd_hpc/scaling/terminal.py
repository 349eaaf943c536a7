"""What a study prints on a terminal: its plan before, its result table after."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from qsgd_hpc.scaling import words
from qsgd_hpc.scaling.plan import PLAIN_BITS, Point, plan, script_args
from qsgd_hpc.scaling.report import HEADINGS, Report, cells
from qsgd_hpc.scaling.study import Study

__all__ = ["console", "print_plan", "print_result"]

COLOURS = {32: "default", 8: "bright_blue", 4: "yellow", 2: "magenta"}

# Columns that a terminal of less than WIDE characters leaves to the report.
WIDE = 112
WIDE_ONLY = ("total_bytes", "communication")


def console() -> Console:
    """Return a console on standard output; a pipe or a log gets lines of 120 characters."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def print_plan(console: Console, study: Study, done: Sequence[str]) -> None:
    """Print the points in their order of measurement; `done` holds the keys of finished ones."""
    points = plan(study)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "nodes", "ranks", "bits", "repeat", "state"):
        table.add_column(name, justify="left" if name == "state" else "right")
    for number, point in enumerate(points, start=1):
        state = "finished" if point.key in done else "to measure"
        table.add_row(
            str(number),
            str(point.nodes),
            str(point.ranks),
            words.bits_name(point.bits),
            str(point.repeat),
            Text(state, style="green" if point.key in done else ""),
        )
    console.print(Text(f"{study.script.name}, {study.mode} scaling on site {study.site}"))
    console.print(table)
    for line in _remarks(study, points):
        console.print(Text(line, style="dim"), soft_wrap=True)


def _remarks(study: Study, points: Sequence[Point]) -> list[str]:
    remarks = [
        f"Each point runs: {study.script.name} {' '.join(script_args(study, points[0]))}",
        "The order is shuffled by a fixed seed, so that drift of the machine does not look like "
        "scaling.",
    ]
    if any(p.ranks == 1 for p in points) and study.bits != (PLAIN_BITS,):
        remarks.append("One rank sends nothing, so it is measured once per repeat, as fp32.")
    return remarks


def print_result(console: Console, report: Report, page: Path) -> None:
    """Print the headline, the table, what to mind, and where the report is."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    headings = [(k, name) for k, name in HEADINGS if console.width >= WIDE or k not in WIDE_ONLY]
    for key, name in headings:
        # Two lines for long names: cut ones would puzzle, and the numbers need the width.
        heading = name.replace(" ", "\n", 1)
        table.add_column(heading, justify="left" if key == "bits" else "right", no_wrap=True)
    rows = report.analysis.rows()
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        text = cells(row)
        if text["speed_range"]:
            text["speed"] += f" ({text['speed_range']})"
        style = COLOURS[row["bits"]]
        table.add_row(*(Text(text[k], style=style if k == "bits" else "") for k, _ in headings))
        if after is not None and after["ranks"] != row["ranks"]:
            table.add_section()
    console.print()
    console.print(Text(report.findings.headline, style="bold"), soft_wrap=True)
    console.print()
    console.print(table, soft_wrap=not console.is_terminal)
    console.print()
    for caution in (*report.findings.cautions, *report.origins.cautions, *report.incidents):
        console.print(Text(caution, style="dim"), soft_wrap=not console.is_terminal)
    console.print(Text(f"Report: {page}", style="bold"), soft_wrap=True)
