#!/usr/bin/env python3
"""Compare agreement along the engine's tree with a star, simulated for 64 to 16,384 ranks.

    simulate.py --png ../../docs/agreement.png

Prints and draws a table for the networks of Polaris and Frontier, for ranks that are ready at the
same time and for ranks that are a millisecond apart. Circles are measurements by `drive.cc`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qsgd_hpc.jobs import sites
from qsgd_hpc.scaling.predict.agreement import arrivals, parents, root_s, simulate
from qsgd_hpc.scaling.predict.fabric import Fabric, fabric_of_site
from qsgd_hpc.scaling.predict.schedules import Layout

MEASURED = Path(__file__).parents[1] / "results" / "agreement.txt"
SITES = {"polaris": 4, "frontier": 8}
TENSORS = 100
SPREAD_S = 1e-3
SHOWN = (64, 512, 2048, 16384)
DRAWN = tuple(64 << i for i in range(9))
TICKS = (64, 512, 4096, 16384)
Times = tuple[float, float, float]


def times(ranks: int, per_node: int, fabric: Fabric, *, star: bool) -> Times:
    """Return ms for ranks ready at the same time, for ranks that are not, and of rank 0's work."""
    layout = Layout(ranks, per_node)
    tree = np.zeros(ranks, np.int64) if star else parents(layout)
    both = [
        simulate(tree, layout, fabric, TENSORS, arrivals(layout, spread_s))
        for spread_s in (0.0, SPREAD_S)
    ]
    work_s = root_s(both[0].root_messages, 1, TENSORS)
    return 1e3 * both[0].seconds, 1e3 * both[1].seconds, 1e3 * work_s


def row(name: str, ranks: int) -> str:
    """Return a row of Markdown: for each time the tree's value, then the star's."""
    fabric = fabric_of_site(sites.load(name))
    tree, star = (times(ranks, SITES[name], fabric, star=star) for star in (False, True))
    cells = [
        f"{ours:.2f} / {theirs:{'.2f' if theirs < 9.95 else '.0f'}}"
        for ours, theirs in zip(tree, star, strict=True)
    ]
    return f"| {name.title()}, {ranks:,} ranks | {' | '.join(cells)} |"


def measured(per_node: int) -> list[tuple[int, bool, float]]:
    """Return (ranks, whether it is a star, ms) of the record's rows with `per_node` ranks."""
    found = []
    for line in MEASURED.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        ranks, placed, tensors, fan_out, _, _, _, least_us, _ = line.split()
        star = int(fan_out) > 0
        if int(tensors) == TENSORS and (star or int(placed) == per_node):
            found.append((int(ranks), star, float(least_us) / 1e3))
    return found


def draw(path: Path) -> None:
    """Write the figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from qsgd_hpc.scaling.report.drawing.style import QUIET, STYLE, colour

    plt.rcParams.update(STYLE)
    figure, grid = plt.subplots(2, 2, figsize=(6.5, 5.2), sharex=True, sharey=True)
    for column, (name, per_node) in zip(grid.T, SITES.items(), strict=True):
        fabric = fabric_of_site(sites.load(name))
        column[0].set_title(f"{name.title()}, {per_node} ranks a node", fontsize=10, loc="left")
        for star, shade in ((True, QUIET), (False, colour(8))):
            at_once, apart, work = zip(
                *(times(ranks, per_node, fabric, star=star) for ranks in DRAWN), strict=True
            )
            what = "star" if star else "tree"
            column[0].plot(DRAWN, at_once, color=shade, label=f"{what}, all ready at once")
            column[0].plot(DRAWN, apart, color=shade, ls="--", label=f"{what}, 1 ms apart")
            column[1].plot(DRAWN, work, color=shade)
            points = [(ranks, ms) for ranks, is_star, ms in measured(per_node) if is_star == star]
            column[1].plot(*zip(*points, strict=True), "o", color=shade, mfc="none", ms=5)
        scale(column)
    grid[0][0].set_ylabel("until all ranks know, ms")
    grid[1][0].set_ylabel("rank 0's work, ms")
    handles, names = grid[0][0].get_legend_handles_labels()
    handles += [plt.Line2D([], [], color=QUIET, ls="", marker="o", mfc="none", ms=5)]
    figure.legend(
        handles,
        [*names, "measured, without MPI"],
        loc="lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=130, metadata={"Software": None})


def scale(column: Sequence[Any]) -> None:
    """Format the axes of a column of charts."""
    from qsgd_hpc.scaling.report.drawing.style import GRID

    for axes in column:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(0.1, 400)
        axes.set_xticks(TICKS, [f"{ranks:,}" for ranks in TICKS])
        axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        axes.minorticks_off()
        axes.tick_params(length=0, labelsize=9)
        axes.grid(color=GRID, lw=0.8)
    column[-1].set_xlabel("ranks")


def main() -> None:
    """Print the table and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    print("| tree / star, ms | all ready at once | 1 ms apart | rank 0's work |")
    print("|---|---:|---:|---:|")
    for name in SITES:
        print("\n".join(row(name, ranks) for ranks in SHOWN))
    if args.png:
        draw(args.png)


if __name__ == "__main__":
    main()
