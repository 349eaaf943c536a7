"""Quality over time and epochs, and bars of the largest size: bytes on the wire, and quality."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.ticker import MaxNLocator

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.results import CaseAnalysis
from qsgd_hpc.scaling.analysis.verdicts import largest_rows
from qsgd_hpc.scaling.define.plan import PLAIN_BITS
from qsgd_hpc.scaling.report.cells import interval, place
from qsgd_hpc.scaling.report.drawing.style import (
    GRID,
    PAPER,
    QUIET,
    Panel,
    Row,
    beside,
    bits_axis,
    colour,
    mark,
    marker,
    side_labels,
)

__all__ = ["curve_panels", "quality_panels", "wire_panels"]

# With at most this many epochs, each has a marker.
MARKED_UP_TO = 20
NAMES = {"elapsed_s": "time since the first step", "epoch": "epoch"}


def curve_panels(case: CaseAnalysis) -> list[Panel]:
    """Return the curves of the quality, one panel for each number of nodes with curves."""
    curves = _recorded(case)
    if curves.empty:
        return []
    return [
        Panel(
            f"accuracy_{nodes}",
            f"{units.quality_name(case.quality)} while training, {units.nodes_name(nodes)}",
            "",
            2.2,
            partial(_curves, case=case, found=found),
            axes=len(_clocks(found)),
        )
        for nodes, found in curves.groupby("nodes")
    ]


def wire_panels(case: CaseAnalysis) -> list[Panel]:
    """Return the bytes of a step at the largest size in a list; it is empty if none are known."""
    largest = largest_rows(case)
    rows = [r for r in largest if r["wire_bytes_per_step"]]
    if not rows:
        return []
    title = f"Bytes on the wire per step, {units.nodes_name(largest[0]['nodes'])}"
    caption = "What all ranks together send in one training step."
    height = 0.5 + 0.4 * len(largest)
    return [Panel("wire", title, caption, height, lambda axes: _wire(axes[0], rows))]


def quality_panels(case: CaseAnalysis) -> list[Panel]:
    """Return the quality at the largest size in a list; it is empty if none is known."""
    largest = largest_rows(case)
    rows = [r for r in largest if case.quality and r[case.quality] is not None]
    if not rows:
        return []
    title = f"{units.quality_name(case.quality)}, {units.nodes_name(largest[0]['nodes'])}"
    caption = "After the last epoch. The axis does not start at zero."
    height = 0.5 + 0.4 * len(largest) + 0.2
    return [Panel("quality", title, caption, height, lambda axes: _quality(axes[0], case, rows))]


def _recorded(case: CaseAnalysis) -> pd.DataFrame:
    """Return the epochs at which a quality was recorded; empty if there is none."""
    if not case.quality or case.curves.empty:
        return case.curves.head(0)
    found = case.curves[case.curves[case.quality].notna()]
    # A curve needs two points.
    counts = found.groupby(["nodes", "bits", "repeat"])["epoch"].transform("size")
    return found[counts > 1]


def _clocks(found: pd.DataFrame) -> list[str]:
    """Return the x axes of the curves: epochs, and elapsed time if it was recorded."""
    return ["elapsed_s", "epoch"] if found["elapsed_s"].notna().all() else ["epoch"]


def _curves(many: Sequence[Any], case: CaseAnalysis, found: pd.DataFrame) -> None:
    """Draw the _recorded() epochs of one size, on one axes for each of _clocks().

    A line is the median over the repeats, at the median of their times; each repeat is a pale line.
    """
    for axes, clock in zip(many, _clocks(found), strict=True):
        labels = []
        for bits in sorted(found["bits"].unique(), reverse=True):
            series = found[found["bits"] == bits]
            last = _line(axes, case, series, clock, int(bits))
            labels.append((last, f"{units.bits_name(int(bits))}", colour(int(bits))))
        _layout(axes, case, clock, found)
        side_labels(axes, labels)
        if case.target is not None:
            _target(axes, case)


def _line(axes: Any, case: CaseAnalysis, series: pd.DataFrame, clock: str, bits: int) -> float:
    scale = _scale(case)
    repeats = list(series.groupby("repeat"))
    if len(repeats) > 1:
        for _, one in repeats:
            pale = {"color": colour(bits), "lw": 0.9, "alpha": 0.35, "zorder": 2}
            mark(axes.plot(one[clock], scale * one[case.quality], **pale)[0], bits)
    middle = series.groupby("epoch", as_index=False)[["elapsed_s", case.quality]].median()
    ys = scale * middle[case.quality]
    mark(axes.plot(middle[clock], ys, color=colour(bits), lw=2, zorder=3)[0], bits)
    if len(middle) <= MARKED_UP_TO:
        for row in middle.to_dict("records"):
            _dot(axes, case, row, clock, bits)
    return float(ys.iloc[-1])


def _dot(axes: Any, case: CaseAnalysis, row: Any, clock: str, bits: int) -> None:
    style = {"color": colour(bits), "ms": 5.5, "mec": PAPER, "mew": 0.9, "zorder": 4}
    value = row[case.quality]
    dot = axes.plot(row[clock], _scale(case) * value, marker(bits), clip_on=False, **style)[0]
    when = "" if pd.isna(row["elapsed_s"]) else f"after {units.duration(row['elapsed_s'])}"
    name = f"{units.bits_name(bits)}, epoch {row['epoch']:g}"
    mark(dot, bits, name, units.quality(case.quality, value), when)


def _layout(axes: Any, case: CaseAnalysis, clock: str, found: pd.DataFrame) -> None:
    accuracy = case.quality == "test_accuracy"
    values = _scale(case) * found[case.quality]
    if not accuracy and values.max() > 20 * values.min():
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}{'%' if accuracy else ''}")
    axes.minorticks_off()
    axes.set_xlabel(NAMES[clock])
    if clock == "elapsed_s":
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 3, 5, 6, 10]))
        axes.xaxis.set_major_formatter(lambda value, _: "0" if value == 0 else _clock(value))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)


def _clock(value: float) -> str:
    if value < 60:
        return f"{value:g} s"
    minutes = value / 60
    return f"{minutes:.3g} min" if minutes < 120 else f"{minutes / 60:.3g} h"


def _target(axes: Any, case: CaseAnalysis) -> None:
    assert case.target is not None
    height = _scale(case) * case.target
    axes.axhline(height, color=QUIET, lw=1, dashes=(4, 3), zorder=1)
    axes.annotate(
        f"target {units.quality(case.quality, case.target)}",
        (0.99, height),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        color=QUIET,
        fontsize=9,
    )


def _scale(case: CaseAnalysis) -> float:
    return 100 if case.quality == "test_accuracy" else 1


def _wire(axes: Any, rows: Sequence[Row]) -> None:
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


def _quality(axes: Any, case: CaseAnalysis, rows: Sequence[Row]) -> None:
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
