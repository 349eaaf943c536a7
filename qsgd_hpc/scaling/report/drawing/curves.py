"""Quality over time and epochs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.ticker import MaxNLocator

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.results import CaseAnalysis
from qsgd_hpc.scaling.report.drawing.style import (
    GRID,
    PAPER,
    QUIET,
    Panel,
    colour,
    mark,
    marker,
    side_labels,
)

__all__ = ["curve_panels"]

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
