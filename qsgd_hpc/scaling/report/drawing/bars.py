"""Charts of the largest size: bytes on the wire, and quality of the training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.results import CaseAnalysis
from qsgd_hpc.scaling.define.plan import PLAIN_BITS
from qsgd_hpc.scaling.report.cells import interval, place
from qsgd_hpc.scaling.report.drawing.panel import mark
from qsgd_hpc.scaling.report.drawing.style import (
    GRID,
    PAPER,
    Row,
    beside,
    bits_axis,
    colour,
    marker,
)

__all__ = ["quality_dots", "wire"]


def wire(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the bytes that all ranks together send in one step."""
    bits_axis(axes, rows)
    for line, row in enumerate(rows):
        value, ratio = row["wire_bytes_per_step"], row["compression_ratio"]
        plain = row["bits"] == PLAIN_BITS or ratio is None
        fewer = "" if plain else f"{units.times(ratio)} fewer"
        size = units.bytes_short(value)
        bar = axes.barh(line, value, height=0.56, color=colour(row["bits"]))
        mark(bar[0], row["bits"], place(row), f"{value:,.0f} bytes per step", fewer)
        beside(axes, value, line, f"{size},  {fewer}" if fewer else size, row["bits"])
    axes.set_xlim(0, max(r["wire_bytes_per_step"] for r in rows) * 1.3)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def quality_dots(axes: Any, case: CaseAnalysis, rows: Sequence[Row]) -> None:
    """Draw the accuracies or perplexities reached, with their intervals."""
    bits_axis(axes, rows)
    accuracy = case.quality == "test_accuracy"
    scale = 100 if accuracy else 1
    values = [scale * r[case.quality] for r in rows]
    lows = [_bound(r, case.quality, "lo", scale) for r in rows]
    highs = [_bound(r, case.quality, "hi", scale) for r in rows]
    middle = (min(lows) + max(highs)) / 2
    half = max(0.5 if accuracy else 0.02 * middle, 0.7 * (max(highs) - min(lows)))
    axes.set_xlim(middle - half, middle + half * 1.7)
    for line, row in enumerate(rows):
        shade = colour(row["bits"])
        if highs[line] > lows[line]:
            style = {"lw": 5, "alpha": 0.3, "solid_capstyle": "butt"}
            span = [lows[line], highs[line]]
            mark(axes.plot(span, [line] * 2, color=shade, **style)[0], row["bits"])
        dot = axes.plot(values[line], line, marker(row["bits"]), color=shade, ms=8, mec=PAPER)
        spread = interval(row, case.quality, lambda v: units.quality(case.quality, v))
        text = units.quality(case.quality, row[case.quality])
        mark(dot[0], row["bits"], place(row), text, spread)
        beside(axes, highs[line], line, text, row["bits"], gap=9)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}{'%' if accuracy else ''}")
    axes.grid(axis="x", color=GRID, lw=0.8)
    axes.spines["bottom"].set_visible(False)


def _bound(row: Row, name: str, end: str, scale: float) -> float:
    bound = row[f"{name}_{end}"]
    return scale * float(row[name] if bound is None else bound)
