"""Charts of one case on several networks: its speed and its time to the target."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.analysis.verdicts import plain_row
from qsgd_hpc.scaling.report.cells import interval
from qsgd_hpc.scaling.report.drawing.style import GRID, INK, QUIET, Panel, Row, Swatch, colour, mark
from qsgd_hpc.scaling.report.networks import Family, gain

__all__ = ["network_panels"]

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
    for place, member in enumerate(family.members):
        rows = family.rows(member)
        plain = plain_row(rows)
        for row in rows:
            if row[column] is None:
                continue
            x = place + (bits.index(row["bits"]) - (len(bits) - 1) / 2) * width
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
    axes.tick_params(length=0)
    axes.margins(x=0.02, y=0.12)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.spines["left"].set_visible(False)
    axes.set_ylabel("seconds" if column != "throughput" else f"{family.unit}/s", color=QUIET)


def _label(axes: Any, x: float, row: Row, column: str, text: str) -> None:
    style = {"textcoords": "offset points", "ha": "center", "color": INK, "fontsize": 9.5}
    mark(axes.annotate(text, (x, row[column]), xytext=(0, 4), **style), row["bits"])
