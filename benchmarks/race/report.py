#!/usr/bin/env python3
"""Print when each entrant reaches the base's loss, and draw the losses over time.

    report.py ../results/race-*.json
    report.py ../results/race-*.json --png ../../docs/race.png

The target is the base's final validation loss, as the mean over all seeds. Each seed gives a pair:
the entrant and the base have the same initial weights and batches. Times are the steps to target
multiplied by the step's time on a network; 95% intervals are of the mean logarithm of ratios.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

BASE = "DDP bf16"
WINDOW = 3  # validations whose mean is the loss
MARGIN = 0.005  # nats; a smaller loss of quality does not count
# Quantiles of Student's t (97.5% and 99%) by the number of pairs.
STUDENT = {
    3: (4.303, 6.965), 4: (3.182, 4.541), 5: (2.776, 3.747), 6: (2.571, 3.365), 7: (2.447, 3.143),
    8: (2.365, 2.998), 9: (2.306, 2.896), 10: (2.262, 2.821),
}  # fmt: skip
Record = dict[str, Any]


def smoothed(row: Record) -> list[float]:
    """Return the moving mean of the validation losses."""
    losses = row["losses"]
    return [statistics.mean(losses[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(losses))]


def reached(row: Record, goal: float) -> int | None:
    """Return the number of steps to the goal, or None if it was not reached."""
    for i, loss in enumerate(smoothed(row)):
        if loss <= goal:
            return (i + 1) * int(row["every"])
    return None


def final(row: Record, steps: int) -> float:
    """Return the loss after a number of steps."""
    return smoothed(row)[steps // row["every"] - 1]


def of_seeds(record: Record, what: str) -> dict[int, Record]:
    """Return an entrant's rows by seed."""
    return {row["seed"]: row for row in record["rows"] if row["what"] == what}


def entrants(*records: Record) -> list[str]:
    """Return the entrants in the order of the records' rows."""
    return list(dict.fromkeys(row["what"] for record in records for row in record["rows"]))


def target(record: Record) -> float:
    """Return the target loss."""
    return statistics.mean(final(row, record["steps"]) for row in of_seeds(record, BASE).values())


def interval(logs: list[float], more: float = 0.0) -> tuple[float, float, float]:
    """Return a mean ratio and its interval; ``more`` is a further variance of the mean."""
    mean = statistics.mean(logs)
    if len(logs) < min(STUDENT):
        return math.exp(mean), math.nan, math.nan
    wide = STUDENT[len(logs)][0] * math.sqrt(statistics.variance(logs) / len(logs) + more)
    return math.exp(mean), math.exp(mean - wide), math.exp(mean + wide)


def speed(record: Record, what: str, network: str) -> str:
    """Return the base's time to the target over the entrant's, with its interval."""
    goal = target(record)
    rows, base = of_seeds(record, what), of_seeds(record, BASE)
    pairs = [(reached(base[s], goal), reached(rows[s], goal)) for s in rows if s in base]
    logs = [math.log(b / own) for b, own in pairs if b is not None and own is not None]
    if len(logs) < len(pairs) or not logs:
        return "not reached"
    times = record["times_s"][network]
    steps = [math.log(b / own) for b, own in zip(times[BASE], times[what], strict=True)]
    scatter = statistics.variance(steps) / len(steps)
    whole = statistics.median(steps)
    mean, low, high = interval([log + whole for log in logs], scatter)
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def quality(record: Record, what: str) -> str:
    """Return the mean difference of final losses, and whether non-inferiority is shown."""
    rows, base = of_seeds(record, what), of_seeds(record, BASE)
    steps = record["steps"]
    differences = [final(rows[s], steps) - final(base[s], steps) for s in rows if s in base]
    mean = statistics.mean(differences)
    if what == BASE or len(differences) < min(STUDENT):
        return f"{mean:+.4f}"
    scale = statistics.stdev(differences) / math.sqrt(len(differences))
    shown = mean + STUDENT[len(differences)][1] * scale < MARGIN
    return f"{mean:+.4f}, {'not inferior' if shown else 'not shown'}"


def table(record: Record) -> str:
    """Return one track's table."""
    networks = list(record["times_s"])
    goal = target(record)
    heads = ["", "steps to the target", "loss at the base's end (p < 0.01)"]
    for network in networks:
        heads += [f"ms a step, {network}", f"times as soon as {BASE}, {network}"]
    lines = []
    for what in entrants(record):
        found = [reached(row, goal) for row in of_seeds(record, what).values()]
        there = [steps for steps in found if steps is not None]
        steps = f"{statistics.mean(there):.0f}" if there else "none"
        if len(there) < len(found):
            steps += f" ({len(there)} of {len(found)} seeds)"
        line = [what, steps, quality(record, what)]
        for network in networks:
            step_s = statistics.median(record["times_s"][network][what])
            line += [f"{1e3 * step_s:.1f}", speed(record, what, network)]
        lines.append(line)
    title = (
        f"{record['task']}, {record['parameters'] / 1e6:.1f} million parameters, "
        f"{record['ranks']} hosts; target: a validation loss of {goal:.4f} nats, "
        f"{BASE}'s after {record['steps']} steps"
    )
    rows = [f"| {' | '.join(line)} |" for line in (heads, *lines)]
    return "\n".join([title, "", rows[0], "|---" * len(heads) + "|", *rows[1:]])


def draw(records: list[Record], network: str) -> Any:
    """Return the figure: the mean loss of each entrant over time, a chart for each track."""
    import matplotlib.pyplot as plt

    colours = {what: f"C{i}" for i, what in enumerate(entrants(*records))}
    figure, charts = plt.subplots(1, len(records), figsize=(4.2 * len(records), 3.4), squeeze=False)
    for axes, record in zip(charts[0], records, strict=True):
        for what in entrants(record):
            curves = [smoothed(row) for row in of_seeds(record, what).values()]
            means = [statistics.mean(at) for at in zip(*curves, strict=False)]
            step_s = statistics.median(record["times_s"][network][what])
            every = record["rows"][0]["every"]
            axes.plot(
                [(i + 1) * every * step_s for i in range(len(means))],
                means,
                color=colours[what],
            )
        axes.axhline(target(record), lw=0.8, color="grey")
        axes.set_title(f"{record['task']}, {network}", loc="left", fontsize=9)
        axes.set_xlabel("seconds")
    charts[0][0].set_ylabel("validation loss, nats")
    lines = [plt.Line2D([], [], color=colour) for colour in colours.values()]
    charts[0][-1].legend(lines, list(colours), frameon=False, fontsize=7)
    figure.tight_layout()
    return figure


def main() -> None:
    """Print the tables, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--png", type=Path, help="draw the losses over time, too")
    parser.add_argument("--network", default="1gbit", help="of the drawing (default 1gbit)")
    args = parser.parse_args()
    records = [json.loads(path.read_text(encoding="utf-8")) for path in args.records]
    print("\n\n".join(table(record) for record in records))
    if args.png:
        import matplotlib

        from qsgd_hpc.scaling.report.drawing.style import STYLE

        matplotlib.use("Agg")
        with matplotlib.rc_context(STYLE):
            figure = draw(records, args.network)
            figure.savefig(args.png, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
