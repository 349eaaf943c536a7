"""Line charts: speed against the number of nodes, and quality over time and epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.ticker import MaxNLocator

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.results import CaseAnalysis, Fit, Row
from qsgd_hpc.scaling.analysis.verdicts import largest_rows
from qsgd_hpc.scaling.report.drawing.style import (
    INK,
    PAPER,
    QUIET,
    Panel,
    colour,
    grid,
    logarithmic,
    mark,
    marker,
    nodes_axis,
    side_labels,
    value_axis,
)
from qsgd_hpc.scaling.report.tables import interval, place

__all__ = ["best_fits", "curve_panels", "efficiency_panels", "speedup_panels", "throughput_panel"]

# Laws are drawn up to this multiple of the largest size.
BEYOND = 2
# Residuals up to this are rounding errors.
EXACT = 1e-9


def throughput_panel(case: CaseAnalysis, *, log: bool | None = None) -> Panel:
    """Return throughput over nodes, on logarithmic or linear axes; None: chosen by the sizes."""
    lines = len(largest_rows(case))
    return Panel(
        "throughput",
        f"{units.capitalised(case.unit)} per second",
        "Dashed: ideal, the reference multiplied by the ranks. Bars: 95% intervals."
        if case.table["throughput_lo"].notna().any()
        else "Dashed: ideal, the reference multiplied by the ranks.",
        max(4.25, 0.8 * lines + 2.1),
        lambda axes: _throughput(axes[0], case, log=log),
    )


def efficiency_panels(case: CaseAnalysis) -> list[Panel]:
    """Return the efficiency over nodes in a list, which is empty for a single size."""
    if case.table["nodes"].nunique() == 1:
        return []
    caption = "Speed-up over the ratio of ranks; 100% is ideal."
    return [
        Panel("efficiency", "Efficiency", caption, 3.2, lambda axes: _efficiency(axes[0], case))
    ]


def speedup_panels(case: CaseAnalysis) -> list[Panel]:
    """Return the speed-ups with the laws fitted to them in a list, which is empty without laws."""
    if not case.fits:
        return []
    caption = (
        "Points: measured. Lines: of the laws that apply, each series’ one with the smallest "
        "residuals, drawn to twice the largest size. Dashed: ideal."
    )
    title = "Speed-up and fitted laws"
    return [Panel("speedup", title, caption, 3.2, lambda axes: _speedup(axes[0], case))]


def _throughput(axes: Any, case: CaseAnalysis, *, log: bool | None) -> None:
    """Draw throughput with its intervals, and the ideal: the reference times the ranks."""
    rows = case.rows()
    base = next(r for r in rows if (r["ranks"], r["bits"]) == case.reference)
    ranks = _ranks(rows)
    nodes = sorted(ranks)
    ideal = [base["throughput"] * ranks[n] / base["ranks"] for n in nodes]
    log = logarithmic(nodes) if log is None else log
    nodes_axis(axes, ranks, log=log)
    lowest, highest = _span(rows, "throughput")
    value_axis(axes, min(*ideal, lowest), max(*ideal, highest), log=log)
    mark(axes.plot(nodes, ideal, color=QUIET, lw=1, dashes=(4, 3), zorder=1)[0], "ideal")
    labels = [(ideal[-1], "ideal", QUIET)] if len(nodes) > 1 else []

    def tip(row: Row) -> tuple[str, ...]:
        return (
            f"{units.speed(row['throughput'])} {case.unit}/s",
            interval(row, "throughput", units.speed),
            f"{units.times(row['speedup'])} over the reference",
        )

    labels += _lines(axes, rows, "throughput", units.speed, tip)
    side_labels(axes, labels)


def _efficiency(axes: Any, case: CaseAnalysis) -> None:
    """Draw efficiency with its intervals; 100 % is ideal."""
    rows = case.rows()
    ranks = _ranks(rows)
    nodes = sorted(ranks)
    nodes_axis(axes, ranks, log=logarithmic(nodes))
    value_axis(axes, 0, max(1.0, _span(rows, "efficiency")[1]), log=False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    mark(axes.axhline(1, color=QUIET, lw=1, dashes=(4, 3), zorder=1), "ideal")

    def tip(row: Row) -> tuple[str, ...]:
        return (
            f"{units.percent(row['efficiency'])} of ideal",
            interval(row, "efficiency", units.percent),
        )

    labels = _lines(axes, rows, "efficiency", units.percent, tip)
    side_labels(axes, [(1.0, "ideal", QUIET), *labels])


def _speedup(axes: Any, case: CaseAnalysis) -> None:
    """Draw the measured speed-ups as points and each series' best fitting law as a line."""
    rows = case.rows()
    ranks = _ranks(rows)
    nodes = sorted(ranks)
    per_node = ranks[nodes[-1]] / nodes[-1]
    log = logarithmic(nodes)
    lowest, highest = _span(rows, "speedup")
    far = nodes[-1] * BEYOND
    count = 60
    grid = [nodes[0] * (far / nodes[0]) ** (i / count) for i in range(count + 1)]
    curves = [(fit, _law(fit, case, rows)) for fit in best_fits(case)]
    drawn = [law(n * per_node) for _, law in curves for n in grid]
    top = max([highest, *drawn])
    nodes_axis(axes, {**ranks, far: int(far * per_node)}, log=log)
    value_axis(axes, min([lowest, 1.0, *drawn]), top, log=log)
    base = case.reference[0]
    ideal = [r for n in grid if (r := n * per_node / base) <= top]
    axes.plot(grid[: len(ideal)], ideal, color=QUIET, lw=1, dashes=(4, 3), zorder=1)
    labels = []
    for fit, law in curves:
        values = [law(n * per_node) for n in grid]
        line = axes.plot(grid, values, color=colour(fit.bits), lw=1.6, zorder=2)[0]
        mark(line, fit.bits)
        labels.append((values[-1], units.bits_name(fit.bits), colour(fit.bits)))

    def tip(row: Row) -> tuple[str, ...]:
        return (
            f"speed-up {units.times(row['speedup'])}",
            interval(row, "speedup", units.times),
        )

    for row in rows:
        _point(axes, row, "speedup", tip(row))
    side_labels(axes, labels)


def best_fits(case: CaseAnalysis) -> list[Fit]:
    """Return for each series, most bits first, the applicable law with the smallest residuals.

    Of laws with equal residuals, such as those of two sizes, the first one.
    """
    return [
        min((f for f in case.fits if f.bits == bits), key=_rank)
        for bits in sorted({f.bits for f in case.fits}, reverse=True)
    ]


def _rank(fit: Fit) -> tuple[bool, float]:
    return not fit.applies, fit.error if fit.error > EXACT else 0.0


def _law(fit: Fit, case: CaseAnalysis, rows: Sequence[Row]) -> Callable[[float], float]:
    # A law is relative to one rank. The speed-up of the series' first size rescales it to the
    # reference of the table, which may have more ranks.
    first = min((r for r in rows if _belongs(r, fit.bits)), key=lambda r: r["ranks"])
    scale = first["speedup"] / fit.speedup(first["ranks"])
    return lambda ranks: scale * fit.speedup(ranks)


def _ranks(rows: Sequence[Row]) -> dict[int, int]:
    return {r["nodes"]: r["ranks"] for r in rows}


def _span(rows: Sequence[Row], name: str) -> tuple[float, float]:
    lows = [r[name] if r[f"{name}_lo"] is None else r[f"{name}_lo"] for r in rows]
    highs = [r[name] if r[f"{name}_hi"] is None else r[f"{name}_hi"] for r in rows]
    # An interval of two repeats may reach below zero, where a logarithmic axis ends.
    return max(min(lows), min(r[name] for r in rows) / 2), max(highs)


def _belongs(row: Row, bits: int) -> bool:
    # One rank sends nothing, so its measurement is the first point of every series.
    return bool(row["bits"] == bits or row["ranks"] == 1)


def _lines(
    axes: Any,
    rows: Sequence[Row],
    name: str,
    form: Callable[[float], str],
    tip: Callable[[Row], tuple[str, ...]],
) -> list[tuple[float, str, str]]:
    labels = []
    largest = max(r["nodes"] for r in rows)
    for bits in sorted({r["bits"] for r in rows}, reverse=True):
        line = [r for r in rows if _belongs(r, bits)]
        xs, ys = [r["nodes"] for r in line], [r[name] for r in line]
        drawn = axes.plot(xs, ys, color=colour(bits), lw=2.2, solid_capstyle="round", zorder=3)
        mark(drawn[0], bits)
        last = line[-1]
        if last["nodes"] == largest and last["bits"] == bits:
            text = f"{units.bits_name(bits)}  {form(last[name])}"
            labels.append((last[name], text, colour(bits)))
    for row in rows:
        _point(axes, row, name, tip(row))
    return labels


def _point(axes: Any, row: Row, name: str, tip: Sequence[str]) -> None:
    alone = row["ranks"] == 1
    series = "one" if alone else row["bits"]
    x, shade = row["nodes"], INK if alone else colour(row["bits"])
    low, high = row[f"{name}_lo"], row[f"{name}_hi"]
    if low is not None and high is not None:
        style = {"lw": 5, "alpha": 0.3, "solid_capstyle": "butt", "zorder": 2}
        mark(axes.plot([x, x], [low, high], color=shade, **style)[0], series)
    drawn = axes.plot(
        x,
        row[name],
        "o" if alone else marker(row["bits"]),
        color=shade,
        ms=7.5,
        mec=PAPER,
        mew=1.3,
        clip_on=False,
        zorder=4,
    )
    mark(drawn[0], series, place(row), *tip)


# With at most this many epochs, each has a marker.
MARKED_UP_TO = 20
CLOCK_NAMES = {"elapsed_s": "time since the first step", "epoch": "epoch"}


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
    axes.set_xlabel(CLOCK_NAMES[clock])
    if clock == "elapsed_s":
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 3, 5, 6, 10]))
        axes.xaxis.set_major_formatter(lambda value, _: "0" if value == 0 else _clock(value))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    grid(axes, "y")


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
