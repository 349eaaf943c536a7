"""Draw the panels of a study on matplotlib axes: speed against nodes, wire bytes, accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import LogLocator, MaxNLocator

from qsgd_hpc.scaling import words
from qsgd_hpc.scaling.analyse import Analysis
from qsgd_hpc.scaling.plan import PLAIN_BITS

__all__ = ["GRID", "INK", "PAPER", "QUIET", "SERIES", "Panel", "panels"]

Row = Mapping[str, Any]

# After Okabe and Ito, colour-blind safe, darkened so that they read as text on white; every series
# also has a marker and a label of its own.
INK, QUIET, GRID, PAPER = "#1a1f26", "#5c6672", "#e3e6ea", "#fefefe"
SERIES = {32: "#4d5661", 8: "#0072b2", 4: "#c65300", 2: "#a3468c"}
MARKERS = {32: "s", 8: "o", 4: "D", 2: "^"}

# From this ratio of largest to smallest size on, both axes are logarithmic: ideal stays a line.
LOG_FROM = 8


@dataclass(frozen=True)
class Panel:
    """What to draw: a name, a title, a caption, the height in inches, and the function."""

    name: str
    title: str
    caption: str
    height: float
    draw: Callable[[Any], None]


def panels(analysis: Analysis) -> list[Panel]:
    """Return the panels that the study has data for; the first is always the throughput."""
    rows = analysis.rows()
    largest = [r for r in rows if r["ranks"] == rows[-1]["ranks"]]
    where = words.nodes_name(largest[0]["nodes"])
    height = 0.5 + 0.4 * len(largest)
    found = [
        Panel(
            "throughput",
            "Images per second",
            "Dashed: ideal, the reference multiplied by the ranks.",
            max(4.25, 2 * height + 1.1),
            lambda axes: _throughput(axes, rows, analysis.reference),
        )
    ]
    sending = [r for r in largest if r["wire_bytes_per_step"]]
    if sending:
        found.append(
            Panel(
                "wire",
                f"Bytes on the wire per step, {where}",
                "What all ranks together send in one training step.",
                height,
                lambda axes: _wire(axes, sending),
            )
        )
    judged = [r for r in largest if r["test_accuracy"] is not None]
    if judged:
        found.append(
            Panel(
                "accuracy",
                f"Test accuracy, {where}",
                "After the last epoch. The axis does not start at zero.",
                height + 0.2,
                lambda axes: _accuracy(axes, judged),
            )
        )
    return found


def _throughput(axes: Any, rows: Sequence[Row], reference: tuple[int, int]) -> None:
    base = next(r for r in rows if (r["ranks"], r["bits"]) == reference)
    ranks = {r["nodes"]: r["ranks"] for r in rows}
    nodes = sorted(ranks)
    ideal = [base["images_per_s"] * ranks[n] / base["ranks"] for n in nodes]
    lowest = min([*ideal, *(r["images_per_s_min"] for r in rows)])
    highest = max([*ideal, *(r["images_per_s_max"] for r in rows)])
    _scales(axes, nodes, lowest, highest)
    axes.set_xlabel("nodes" if ranks == {n: n for n in nodes} else "nodes (ranks below)")
    ticks = [str(n) if ranks[n] == n else f"{n}\n{ranks[n]}" for n in nodes]
    axes.set_xticks(nodes, ticks)
    axes.minorticks_off()
    axes.plot(nodes, ideal, color=QUIET, lw=1, dashes=(4, 3), zorder=1)
    labels = [(ideal[-1], "ideal", QUIET)] if len(nodes) > 1 else []
    for bits in sorted({r["bits"] for r in rows}, reverse=True):
        # One rank sends nothing: its one measurement is where every series starts.
        line = [r for r in rows if r["bits"] == bits or r["ranks"] == 1]
        _series(axes, line, bits)
        if line[-1]["nodes"] == nodes[-1] and line[-1]["bits"] == bits:
            value = line[-1]["images_per_s"]
            labels.append((value, f"{words.bits_name(bits)}  {words.speed(value)}", SERIES[bits]))
    _side_labels(axes, labels)


def _scales(axes: Any, nodes: Sequence[int], lowest: float, highest: float) -> None:
    if nodes[-1] / nodes[0] >= LOG_FROM:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(nodes[0] / 1.12, nodes[-1] * 1.12)
        axes.set_ylim(lowest / 1.2, highest * 1.12)
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    else:
        margin = 0.05 * (nodes[-1] - nodes[0] or 1)
        axes.set_xlim(nodes[0] - margin, nodes[-1] + margin)
        axes.set_ylim(0, 1.05 * highest)
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(
        lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"
    )
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)


def _series(axes: Any, line: Sequence[Row], bits: int) -> None:
    colour = SERIES[bits]
    xs, ys = [r["nodes"] for r in line], [r["images_per_s"] for r in line]
    axes.plot(xs, ys, color=colour, lw=2.2, solid_capstyle="round", zorder=3)
    for row in line:
        alone = row["ranks"] == 1
        x, shade = row["nodes"], INK if alone else colour
        if row["repeats"] > 1:
            span = [row["images_per_s_min"], row["images_per_s_max"]]
            axes.plot([x, x], span, color=shade, lw=5, alpha=0.3, solid_capstyle="butt", zorder=2)
        axes.plot(
            x,
            row["images_per_s"],
            "o" if alone else MARKERS[bits],
            color=shade,
            ms=7.5,
            mec=PAPER,
            mew=1.3,
            clip_on=False,
            zorder=5 if alone else 4,
        )


def _side_labels(axes: Any, labels: Sequence[tuple[float, str, str]]) -> None:
    # Right of the last point, in its colour.
    to_axes = axes.transData + axes.transAxes.inverted()
    right = axes.get_xlim()[1]
    ordered = sorted(labels, key=lambda entry: entry[0])
    wanted = [float(to_axes.transform((right, value))[1]) for value, _, _ in ordered]
    for height, (_, text, colour) in zip(spread(wanted, gap=0.066), ordered, strict=True):
        axes.text(
            1.015,
            height,
            text,
            transform=axes.transAxes,
            color=colour,
            va="center",
            fontweight="normal" if colour == QUIET else "bold",
        )


def spread(heights: Sequence[float], *, gap: float) -> list[float]:
    """Move ascending heights as little as possible until neighbours are `gap` apart."""
    # Heights less i * gap must not fall: isotonic regression by pooling neighbours.
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


def _wire(axes: Any, rows: Sequence[Row]) -> None:
    _rows_axis(axes, rows)
    widest = max(r["wire_bytes_per_step"] for r in rows)
    for place, row in enumerate(rows):
        value, ratio = row["wire_bytes_per_step"], row["compression_ratio"]
        axes.barh(place, value, height=0.56, color=SERIES[row["bits"]])
        plain = row["bits"] == PLAIN_BITS or ratio is None
        _beside(
            axes,
            value,
            place,
            words.bytes_short(value) + ("" if plain else f",  {words.times(ratio)} fewer"),
        )
    axes.set_xlim(0, widest * 1.3)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _accuracy(axes: Any, rows: Sequence[Row]) -> None:
    _rows_axis(axes, rows)
    lows = [100 * r["test_accuracy_min"] for r in rows]
    highs = [100 * r["test_accuracy_max"] for r in rows]
    middle = (min(lows) + max(highs)) / 2
    half = max(0.5, 0.7 * (max(highs) - min(lows)))
    axes.set_xlim(middle - half, middle + half * 1.7)
    for place, row in enumerate(rows):
        value, colour = 100 * row["test_accuracy"], SERIES[row["bits"]]
        if row["repeats"] > 1:
            span = [lows[place], highs[place]]
            axes.plot(span, [place] * 2, color=colour, lw=5, alpha=0.3, solid_capstyle="butt")
        axes.plot(value, place, MARKERS[row["bits"]], color=colour, ms=8, mec=PAPER, mew=1.3)
        _beside(axes, highs[place], place, words.accuracy(row["test_accuracy"]), gap=9)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    axes.grid(axis="x", color=GRID, lw=0.8)
    axes.spines["bottom"].set_visible(False)


def _beside(axes: Any, x: float, y: float, text: str, gap: float = 6) -> None:
    axes.annotate(
        text, (x, y), xytext=(gap, -0.5), textcoords="offset points", va="center", color=INK
    )


def _rows_axis(axes: Any, rows: Sequence[Row]) -> None:
    axes.set_yticks(range(len(rows)), [words.bits_name(r["bits"]) for r in rows])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(SERIES[row["bits"]])
        label.set_fontweight("bold")
