"""Charts, independent of their format: content, marks for the interactive page, and style."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

__all__ = [
    "GRID",
    "INK",
    "PAPER",
    "PARTS",
    "QUIET",
    "STYLE",
    "VARIABLES",
    "Panel",
    "Swatch",
    "beside",
    "colour",
    "grid",
    "live",
    "logarithmic",
    "mark",
    "marker",
    "nodes_axis",
    "side_labels",
    "spread",
    "styled",
    "value_axis",
]

_GROUP = re.compile(r"""<g id=(?P<id>"[^"]*"|'[^']*')(?P<rest>[^>]*)>""")


@dataclass(frozen=True)
class Swatch:
    """An entry of a chart's key: the series, its name, and its CSS variable."""

    series: str
    name: str
    variable: str


@dataclass(frozen=True)
class Panel:
    """The content of a chart.

    Attributes:
        name: name of the chart, unique in its case; part of its id in the page.
        title: heading.
        caption: one or two sentences under it.
        height: height of one of its axes in inches.
        draw: draws the chart on a sequence of `axes` axes.
        axes: number of axes; side by side if there is room, else one above the other.
        key: meaning of the colours, if the chart has no labels for it.
    """

    name: str
    title: str
    caption: str
    height: float
    draw: Callable[[Sequence[Any]], None]
    axes: int = 1
    key: tuple[Swatch, ...] = ()


def mark(artist: Any, series: int | str, *tip: str) -> None:
    """Attach a series and the lines of a tooltip to an artist.

    matplotlib writes an artist's gid as the id of its SVG group; :func:`live` converts it to
    attributes for the page.
    """
    artist.set_gid(json.dumps([str(series), *(line for line in tip if line)]))


def live(svg: str) -> str:
    """Convert the ids written by :func:`mark` to data-series and a title; remove all other ids."""

    def group(match: re.Match[str]) -> str:
        try:
            series, *tip = json.loads(html.unescape(match["id"][1:-1]))
        except ValueError:
            return f"<g{match['rest']}>"  # an id of matplotlib: unused, and not unique in a page
        named = f'<g data-series="{html.escape(series)}"'
        if not tip:
            return f"{named}{match['rest']}>"
        text = html.escape("\n".join(tip))
        return f'{named} class="mark"{match["rest"]}><title>{text}</title>'

    return _GROUP.sub(group, svg)


# After Okabe and Ito: colour-blind safe, darkened to be readable as text on white. Every series
# also has its own marker and label.
INK, QUIET, GRID, PAPER = "#1a1f26", "#5c6672", "#e3e6ea", "#fefefe"
SERIES = {32: "#4d5661", 8: "#0072b2", 4: "#c65300", 2: "#a3468c"}
MARKERS = {32: "s", 8: "o", 4: "D", 2: "^"}
# The parts of a step. Exposed communication is the darkest, as the subject of the chart.
PARTS = {
    "compute_s": "#8fb3cc",
    "exposed_s": "#9c2f2f",
    "data_s": "#d9b44a",
    "hidden_s": "#d99a94",
    "coding_s": "#6f7f4f",
}
# In the page every colour becomes a CSS variable, so one SVG serves light, dark and print.
VARIABLES = {
    INK: "--ink",
    QUIET: "--quiet",
    GRID: "--grid",
    PAPER: "--paper",
    **{shade: f"--bits-{bits}" for bits, shade in SERIES.items()},
    **{shade: f"--part-{part.removesuffix('_s')}" for part, shade in PARTS.items()},
}
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10.5,
    # Units and names are from the user's script, where a dollar sign does not begin a formula.
    "text.parse_math": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": QUIET,
    "axes.facecolor": "none",
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "pdf.fonttype": 42,
}
# From this ratio of largest to smallest size, both axes are logarithmic; ideal is a straight line
# on either.
LOG_FROM = 8
LINE_INCHES = 0.21
"""Least distance of two labels beside a chart, in inches."""


@contextmanager
def styled(size: tuple[float, float], *, fonts: str, salt: str) -> Iterator[Figure]:
    """Yield a figure to draw and save in the style of a report.

    Args:
        size: width and height in inches.
        fonts: "path" or "none", how SVG files contain text.
        salt: makes the identifiers of an SVG unique in a page with several drawings.
    """
    with matplotlib.rc_context({**STYLE, "svg.fonttype": fonts, "svg.hashsalt": salt}):
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        yield figure


def colour(bits: int) -> str:
    """Return the colour of a series."""
    return SERIES.get(bits, INK)


def marker(bits: int) -> str:
    """Return the marker of a series."""
    return MARKERS.get(bits, "v")


def logarithmic(nodes: Sequence[int]) -> bool:
    """Return whether these sizes are better shown on logarithmic axes."""
    return nodes[-1] / nodes[0] >= LOG_FROM


def nodes_axis(axes: Any, ranks: Mapping[int, int], *, log: bool) -> None:
    """Lay out the x axis: one tick for each number of nodes, with the ranks below if different."""
    nodes = sorted(ranks)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_xlim(nodes[0] / 1.12, nodes[-1] * 1.12)
    else:
        margin = 0.05 * (nodes[-1] - nodes[0] or 1)
        axes.set_xlim(nodes[0] - margin, nodes[-1] + margin)
    axes.set_xlabel("nodes" if ranks == {n: n for n in nodes} else "nodes (ranks below)")
    # On a linear axis the labels of 1, 2, 4 .. 64 would overlap.
    span = nodes[-1] - nodes[0] or 1
    shown = [n for n in nodes if log or n == nodes[0] or (n - nodes[0]) / span > 0.04]
    axes.set_xticks(shown, [str(n) if ranks[n] == n else f"{n}\n{ranks[n]}" for n in shown])
    axes.minorticks_off()


def grid(axes: Any, axis: str) -> None:
    """Draw lines across the chart at the ticks of an axis ("x" or "y"), in place of its spine."""
    axes.grid(axis=axis, color=GRID, lw=0.8)
    axes.tick_params(length=0)
    axes.spines["left" if axis == "y" else "bottom"].set_visible(False)


def value_axis(axes: Any, lowest: float, highest: float, *, log: bool) -> None:
    """Lay out the y axis for values of at least 0; a linear one starts at 0."""
    if log:
        axes.set_yscale("log")
        axes.set_ylim(lowest / 1.2, highest * 1.12)
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    else:
        axes.set_ylim(0, 1.05 * highest)
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(
        lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"
    )
    axes.minorticks_off()
    grid(axes, "y")


def side_labels(axes: Any, labels: Sequence[tuple[float, str, str]]) -> None:
    """Write (height, text, colour) to the right of the last points, without overlaps."""
    to_axes = axes.transData + axes.transAxes.inverted()
    right = axes.get_xlim()[1]
    ordered = sorted(labels, key=lambda entry: entry[0])
    wanted = [float(to_axes.transform((right, value))[1]) for value, _, _ in ordered]
    inches = axes.get_window_extent().height / axes.figure.dpi
    places = spread(wanted, gap=LINE_INCHES / inches)
    for height, (_, text, shade) in zip(places, ordered, strict=True):
        label = axes.text(
            1.015,
            height,
            text,
            transform=axes.transAxes,
            color=shade,
            va="center",
            fontweight="normal" if shade == QUIET else "bold",
        )
        mark(label, next((bits for bits in SERIES if SERIES[bits] == shade), ""))


def spread(heights: Sequence[float], *, gap: float) -> list[float]:
    """Move ascending heights as little as possible until neighbours are `gap` apart."""
    # height[i] - i * gap must not decrease: isotonic regression by pooling neighbours.
    pools: list[tuple[float, int]] = []
    for i, height in enumerate(heights):
        mean, count = height - i * gap, 1
        while pools and pools[-1][0] > mean:
            before, members = pools.pop()
            mean = (before * members + mean * count) / (members + count)
            count += members
        pools.append((mean, count))
    flat = [mean for mean, count in pools for _ in range(count)]
    return [mean + i * gap for i, mean in enumerate(flat)]


def beside(axes: Any, x: float, y: float, text: str, bits: int, gap: float = 6) -> None:
    """Write a text right of a point of a series."""
    style = {"textcoords": "offset points", "va": "center", "color": INK}
    mark(axes.annotate(text, (x, y), xytext=(gap, -0.5), **style), bits)
