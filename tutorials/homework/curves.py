"""Train a solution of the homework on 1 to 16 ranks and draw its accuracy by epoch.

Run: python curves.py
 or: python curves.py --plot     (draws the records that are there)

Writes records.jsonl, accuracy.pdf and accuracy.png.
"""

import argparse
import json
import os
import subprocess
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

RECORDS = Path("records.jsonl")
TICKS = [0.1, 0.3, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99]


def train(script, ranks, warm_up, options):
    """Run the solution; its rank 0 adds a line to RECORDS after each epoch."""
    command = ["qsgd-hpc", "run", "-np", str(ranks), script, "--warm-up", str(warm_up)]
    # Many ranks share few cores here: one thread each is enough.
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    print(f"{ranks} rank(s), {warm_up:g} epochs of warm-up", flush=True)
    subprocess.run([*command, "--records", str(RECORDS), *options], env=environ, check=True)


def label_ends(ax, ends, gap):
    """Write each line's name behind its end, moved where two would overlap or stand too high.

    `ends` holds (y in the axis's own units, 0 to 1; name; colour).
    """
    ends = sorted(ends)
    ys = [y for y, _, _ in ends]
    for i in range(1, len(ys)):
        ys[i] = max(ys[i], ys[i - 1] + gap)
    ys[-1] = min(ys[-1], 1)
    for i in reversed(range(len(ys) - 1)):
        ys[i] = min(ys[i], ys[i + 1] - gap)
    for y, (_, name, colour) in zip(ys, ends, strict=True):
        ax.annotate(
            name, (1.02, y), xycoords="axes fraction", color=colour, va="center", fontsize=9
        )


def draw(ax, records, key):
    """Draw one curve for each number of ranks."""
    counts = sorted({record["ranks"] for record in records})
    ends = []
    for i, ranks in enumerate(counts):
        # Dark to light with the ranks, without the palest: the order shows in greys as well.
        colour = plt.get_cmap("viridis")(0.85 * i / max(1, len(counts) - 1))
        mine = [record for record in records if record["ranks"] == ranks]
        values = [min(max(record[key], 0.06), 0.995) for record in mine]
        ax.plot([record["epoch"] for record in mine], values, color=colour, marker="o", ms=3)
        _, y = ax.transAxes.inverted().transform(ax.transData.transform((1, values[-1])))
        ends.append((y, f"{ranks} rank{'s' if ranks > 1 else ''}", colour))
    label_ends(ax, ends, gap=0.055)


def plot(records):
    """Save a row of panels for each warm-up: training accuracy, then validation accuracy."""
    warm_ups = sorted({record["warm_up"] for record in records})
    fig, rows = plt.subplots(
        len(warm_ups), 2, figsize=(9, 3.6 * len(warm_ups)), layout="constrained", squeeze=False
    )
    for row, warm_up in zip(rows, warm_ups, strict=True):
        words = f"warm-up over {warm_up:g} epochs" if warm_up else "no warm-up"
        mine = [record for record in records if record["warm_up"] == warm_up]
        for ax, key, kind in zip(
            row, ("train_accuracy", "test_accuracy"), ("Training", "Validation"), strict=True
        ):
            # Near 100 % the mistakes that are left matter: the axis spreads both ends.
            ax.set_yscale("logit")
            ax.set_ylim(0.05, 0.9955)
            ax.set_yticks(TICKS, [f"{100 * tick:.0f} %" for tick in TICKS])
            ax.minorticks_off()
            ax.grid(color="0.9")
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_xlim(1, max(record["epoch"] for record in records))
            ax.set_title(f"{kind} accuracy, {words}", loc="left", fontsize=10)
            draw(ax, mine, key)
    for ax in rows[-1]:
        ax.set_xlabel("epoch")
    fig.savefig("accuracy.pdf", metadata={"CreationDate": None})
    fig.savefig("accuracy.png", dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--script", default="torch/mnist_hvd.py", help="the solution to run")
    parser.add_argument("--ranks", default="1,2,4,8,16", help="default 1,2,4,8,16")
    parser.add_argument("--warm-up", default="0,4", help="in epochs, default 0,4")
    parser.add_argument("--plot", action="store_true", help="only draw the records")
    args, options = parser.parse_known_args()  # the solution takes the others
    if not args.plot:
        RECORDS.unlink(missing_ok=True)
        for ranks in map(int, args.ranks.split(",")):
            for warm_up in map(float, args.warm_up.split(",")):
                train(args.script, ranks, warm_up, options)
    plot([json.loads(line) for line in RECORDS.read_text().splitlines()])


if __name__ == "__main__":
    main()
