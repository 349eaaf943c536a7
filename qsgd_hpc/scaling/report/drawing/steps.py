"""Parts of a step's time: stacked bars, one for each size and bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.results import BREAKDOWN, CaseAnalysis
from qsgd_hpc.scaling.report.cells import place
from qsgd_hpc.scaling.report.drawing.style import (
    GRID,
    PARTS,
    QUIET,
    Panel,
    Row,
    Swatch,
    beside,
    colour,
    mark,
)

__all__ = ["breakdown_panels", "draw_key"]

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
    axes.set_yticks(places, [units.bits_name(r["bits"]) for r in rows])
    axes.set_ylim(places[-1] + 0.6, places[0] - 0.95)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    longest = max(max(_total(r), sum(r[b] or 0 for b in BESIDE)) for r in rows)
    axes.set_xlim(0, longest * 1.14)
    for label, row, y in zip(axes.get_yticklabels(), rows, places, strict=True):
        label.set_color(colour(row["bits"]))
        label.set_fontweight("bold")
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
    axes.grid(axis="x", color=GRID, lw=0.8)
    axes.spines["bottom"].set_visible(False)


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
