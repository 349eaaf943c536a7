#!/usr/bin/env python3
"""Draw the speed with each exchange relative to no exchange, over the network's rate.

    plot.py ../results/end-to-end-*.json --png ../../docs/end_to_end.png

One chart for each network and number of hosts. 100% is the speed without an exchange.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from compare import ALONE, Record, by_name, network, order, ratio

from qsgd_hpc.scaling.report.drawing.style import GRID, INK, QUIET, STYLE, colour

# Peers are grey with different dashes; this package's contestants have the colour of their bits.
LINES: dict[str, tuple[str, str, str]] = {
    "gloo DDP fp32": (QUIET, "-", "s"),
    "gloo DDP fp16": (QUIET, "--", "v"),
    "gloo DDP PowerSGD 1": (QUIET, ":", "^"),
    "gloo DDP PowerSGD 2": (QUIET, "-.", "P"),
    "engine fp32": (INK, "-", "s"),
    "engine 8 bit": (colour(8), "-", "o"),
    "engine 4 bit": (colour(4), "-", "D"),
    "DDP hook 4 bit": (colour(4), "--", "D"),
    "engine top 1%": (colour(2), "-", "X"),
}
RATES = {"100 Mb/s": 1e8, "1 Gb/s": 1e9, "10 Gb/s": 1e10}
Chart = tuple[str, int]
Points = dict[str, dict[str, float]]


def shares(record: Record) -> dict[str, float]:
    """Return, by contestant, the time of a step without an exchange over the contestant's."""
    rows = by_name(record)
    return {what: ratio(rows[ALONE], rows[what]) for what in LINES if what in rows}


def charts(records: Iterable[Record]) -> dict[Chart, Points]:
    """Return the shares by (network, hosts), contestant and rate."""
    found: dict[Chart, Points] = defaultdict(lambda: defaultdict(dict))
    for record in sorted(records, key=order):
        rate = record["where"].partition(" hosts at ")[2]
        if rate in RATES:
            for what, share in shares(record).items():
                found[network(record), record["ranks"]][what][rate] = share
    return found


def draw(found: dict[Chart, Points]) -> Any:
    """Return the figure: a column for each network, a row for each number of hosts."""
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(task for task, _ in found))
    hosts = sorted({ranks for _, ranks in found})
    size = (2.15 * len(tasks), 2.2 * len(hosts) + 0.7)  # legible at the width of a page of text
    figure, grid = plt.subplots(len(hosts), len(tasks), figsize=size, squeeze=False, sharey=True)
    for i, ranks in enumerate(hosts):
        for j, task in enumerate(tasks):
            panel(grid[i][j], found[task, ranks])
            title = f"{task}, {ranks} hosts".replace(", ", "\n", 1)
            grid[i][j].set_title(title, fontsize=9, loc="left", color=INK)
    for axes in grid[-1]:
        axes.set_xlabel("Gb/s")
    for axes in grid[:, 0]:
        axes.set_ylabel("speed, of no exchange")
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=5, frameon=False, fontsize=8.5)
    figure.tight_layout(rect=(0, 0.1, 1, 1), w_pad=0.4)
    return figure


def panel(axes: Any, points: Points) -> None:
    """Draw one chart."""
    for what, (shade, dashes, marker) in LINES.items():
        ordered = sorted(points[what].items(), key=lambda point: RATES[point[0]])
        axes.plot(
            [RATES[rate] for rate, _ in ordered],
            [100 * share for _, share in ordered],
            color=shade, ls=dashes, marker=marker, ms=4, lw=1.6, label=what,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(7e7, 1.5e10)
    axes.set_xticks(list(RATES.values()), [f"{rate / 1e9:g}" for rate in RATES.values()])
    axes.minorticks_off()
    axes.set_ylim(0, 105)
    axes.set_yticks(range(0, 101, 25), [f"{percent}%" for percent in range(0, 101, 25)])
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.tick_params(length=0, labelsize=9)
    axes.spines["left"].set_visible(False)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--png", type=Path, required=True)
    args = parser.parse_args()
    matplotlib.use("Agg")
    records = [json.loads(path.read_text(encoding="utf-8")) for path in args.records]
    with matplotlib.rc_context(STYLE):
        draw(charts(records)).savefig(args.png, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
