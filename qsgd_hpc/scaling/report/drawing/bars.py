"""Bar charts: the parts of a step's time, bytes and quality of the largest size, and networks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.results import BREAKDOWN, CaseAnalysis, Row
from qsgd_hpc.scaling.analysis.verdicts import largest_rows, plain_row
from qsgd_hpc.scaling.define.study import PLAIN_BITS
from qsgd_hpc.scaling.report.drawing.style import (
    INK,
    PAPER,
    PARTS,
    QUIET,
    Panel,
    Swatch,
    beside,
    colour,
    grid,
    mark,
    marker,
)
from qsgd_hpc.scaling.report.networks import Family, gain
from qsgd_hpc.scaling.report.tables import interval, place

__all__ = ["breakdown_panels", "draw_key", "network_panels", "quality_panels", "wire_panels"]

NAMES = {
    "compute_s": "Computing",
    "exposed_s": "Waiting for communication",
    "data_s": "Waiting for data",
    "hidden_s": "Hidden communication",
    "coding_s": "Coding",
}
BESIDE = ("hidden_s", "coding_s")
"""Work of the engine's thread during the step: a separate bar, not part of the step's length."""
_LINE, _GAP = 0.42, 0.75  # inches for a bar; lines between two sizes


def breakdown_panels(case: CaseAnalysis) -> list[Panel]:
    """Return the parts of a step in a list, which is empty if no row has all of them."""
    rows = [r for r in case.rows() if all(r[part] is not None for part in BREAKDOWN)]
    if not rows:
        return []
    title = "Where a step’s time goes"
    caption = "A bar is the mean step. The thin bar under it is the engine’s work at the same time."
    height = 0.55 + _LINE * (_places(rows)[-1] + 1)
    key = tuple(
        Swatch(_series(part), name, f"--part-{_series(part)}")
        for part, name in NAMES.items()
        if any(r[part] for r in rows)
    )
    draw = partial(_breakdown, rows=rows)
    return [Panel("breakdown", title, caption, height, draw, key=key)]


def _breakdown(many: Sequence[Any], rows: Sequence[Row]) -> None:
    """Draw the parts of a step end to end, and under each bar the engine's work during it."""
    (axes,) = many
    places = _places(rows)
    _bits_axis(axes, rows, places)
    axes.set_ylim(places[-1] + 0.6, places[0] - 0.95)
    longest = max(max(_total(r), sum(r[b] or 0 for b in BESIDE)) for r in rows)
    axes.set_xlim(0, longest * 1.14)
    for row, y in zip(rows, places, strict=True):
        _stack(axes, row, BREAKDOWN, y, 0.56)
        _stack(axes, row, BESIDE, y + 0.39, 0.14)
        beside(axes, _total(row), y, units.seconds(_total(row)), row["bits"])
    before = None
    for row, y in zip(rows, places, strict=True):
        if row["ranks"] != before:
            axes.text(0, y - 0.52, _size(row), color=QUIET, fontsize=9.5, va="bottom")
        before = row["ranks"]
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: "0" if value == 0 else units.seconds(value))
    grid(axes, "x")


def draw_key(axes: Any, key: Sequence[Swatch]) -> None:
    """Write the key above the bars, for files; the page has a separate key."""
    handles = [Patch(color=PARTS[f"{s.series}_s"], label=s.name) for s in key]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=3,
        frameon=False,
        fontsize=9.5,
        handlelength=1,
        handleheight=1,
        borderaxespad=0,
    )


def _stack(axes: Any, row: Row, parts: Sequence[str], y: float, height: float) -> None:
    left = 0.0
    for part in parts:
        if not row[part]:
            continue
        bar = axes.barh(y, row[part], left=left, height=height, color=PARTS[part])
        if part in BESIDE:
            detail = "on the engine's thread, during the step"
        else:
            share = units.percent(row[part] / _total(row))
            detail = f"{share} of a step of {units.seconds(_total(row))}"
        value = f"{NAMES[part]}: {units.seconds(row[part])}"
        mark(bar[0], _series(part), place(row), value, detail)
        left += row[part]


def _places(rows: Sequence[Row]) -> list[float]:
    places = [0.0]
    for before, row in pairwise(rows):
        same = row["ranks"] == before["ranks"]
        places.append(places[-1] + 1 + (0.0 if same else _GAP))
    return places


def _series(part: str) -> str:
    return part.removesuffix("_s")


def _size(row: Row) -> str:
    ranks = "" if row["nodes"] == row["ranks"] else f", {row['ranks']} ranks"
    return f"{units.nodes_name(row['nodes'])}{ranks}"


def _total(row: Row) -> float:
    return float(sum(row[part] or 0 for part in BREAKDOWN))


GROUP = 0.82  # width of a network's bars, relative to the distance between two networks


def network_panels(family: Family) -> list[Panel]:
    """Return a panel with the speed on each network and, if known, one with the time to target."""
    key = tuple(Swatch(str(b), units.bits_name(b), f"--bits-{b}") for b in _bits(family))
    where = units.nodes_name(family.nodes)
    title = f"{units.capitalised(family.unit)} per second by network, {where}"
    draw = partial(_bars, family=family, column="throughput")
    found = [Panel("networks", title, "Above a bar: the speed over fp32.", 3.4, draw, key=key)]
    if family.targets:
        title = f"Time to {_target(family)}, {where}"
        caption = "Less is better. Above a bar: how many times sooner than fp32."
        draw = partial(_bars, family=family, column="time_to_target_s")
        found.append(Panel("times", title, caption, 3.4, draw, key=key))
    return found


def _target(family: Family) -> str:
    reached = {units.quality(m.quality, m.target) for m in family.members if m.target}
    if len(reached) != 1:
        return "each network’s target"
    return f"{units.quality_name(family.members[0].quality).lower()} {reached.pop()}"


def _bits(family: Family) -> list[int]:
    rows = (row for member in family.members for row in family.rows(member))
    return sorted({row["bits"] for row in rows}, reverse=True)


def _bars(many: Sequence[Any], family: Family, column: str) -> None:
    (axes,) = many
    form = units.speed if column == "throughput" else units.seconds
    bits = _bits(family)
    width = GROUP / len(bits)
    for at, member in enumerate(family.members):
        rows = family.rows(member)
        plain = plain_row(rows)
        for row in rows:
            if row[column] is None:
                continue
            x = at + (bits.index(row["bits"]) - (len(bits) - 1) / 2) * width
            bar = axes.bar(x, row[column], 0.92 * width, color=colour(row["bits"]))
            times = gain(row, plain, column)
            over = "" if times is None else units.times(times)
            where = f"{member.case.network_label}, {units.bits_name(row['bits'])}"
            tip = [form(row[column]), over and f"{over} fp32"]
            if column == "throughput":
                tip.append(interval(row, column, form))
            mark(bar[0], row["bits"], where, *tip)
            _label(axes, x, row, column, over or form(row[column]))
    axes.set_xticks(range(len(family.members)), [m.case.network_label for m in family.members])
    axes.margins(x=0.02, y=0.12)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    grid(axes, "y")
    axes.set_ylabel("seconds" if column != "throughput" else f"{family.unit}/s", color=QUIET)


def _label(axes: Any, x: float, row: Row, column: str, text: str) -> None:
    style = {"textcoords": "offset points", "ha": "center", "color": INK, "fontsize": 9.5}
    mark(axes.annotate(text, (x, row[column]), xytext=(0, 4), **style), row["bits"])


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


def _wire(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the bytes that all ranks together send in one step."""
    _bits_axis(axes, rows, range(len(rows)))
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
    _bits_axis(axes, rows, range(len(rows)))
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
    grid(axes, "x")


def _bound(row: Row, name: str, end: str, scale: float) -> float:
    bound = row[f"{name}_{end}"]
    return scale * float(row[name] if bound is None else bound)


def _bits_axis(axes: Any, rows: Sequence[Row], places: Sequence[float]) -> None:
    """Lay out the y axis of a bar chart: one line for each row, named by its bits."""
    axes.set_yticks(places, [units.bits_name(r["bits"]) for r in rows])
    axes.set_ylim(places[-1] + 0.55, places[0] - 0.55)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(colour(row["bits"]))
        label.set_fontweight("bold")
