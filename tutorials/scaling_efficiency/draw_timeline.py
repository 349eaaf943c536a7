"""Draw one step of a timeline: what each gradient of one rank went through, and when.

python draw_timeline.py t.json step.png
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

COLOURS = {"NEGOTIATE_ALLREDUCE": "#c7c7c7", "ALLREDUCE": "#4477aa", "WAIT": "#cc6677"}
WORDS = {
    "NEGOTIATE_ALLREDUCE": "not yet ready on all ranks",
    "ALLREDUCE": "being reduced",
    "WAIT": "the program waits",
}


def spans(events: list[dict], rank: int) -> list[tuple[str, str, float, float]]:
    """Return (row, phase, begin, end) in microseconds, of one rank."""
    rows, open_since, found = {}, {}, []
    for event in (e for e in events if e.get("pid") == rank):
        key = (event["tid"], event["name"])
        if event["name"] == "thread_name":
            rows[event["tid"]] = event["args"]["name"].removeprefix("allreduce.gradient.")
        elif event["ph"] == "B":
            open_since[key] = event["ts"]
        elif event["ph"] == "E" and key in open_since:
            found.append((*key, open_since.pop(key), event["ts"]))
        elif event["ph"] == "X":
            found.append((*key, event["ts"], event["ts"] + event["dur"]))
    return [(rows[tid], phase, a, b) for tid, phase, a, b in found if phase in COLOURS]


def main() -> None:
    """Draw the step in which the first gradient is reduced for the `--step`-th time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("timeline", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--step", type=int, default=18)
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()

    found = spans(json.loads(args.timeline.read_text()), args.rank)
    gradients = list(dict.fromkeys(row for row, *_ in found if row.endswith(".weight")))
    first = [a for row, phase, a, _ in found if row == gradients[0] and phase != "ALLREDUCE"]
    begin, end = first[args.step] - 1000, first[args.step + 1] - 1000

    rows = [*gradients, "program"]
    figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
    for row, phase, a, b in found:
        if row in rows and begin <= a < end:
            axes.barh(rows.index(row), (b - a) / 1e3, left=(a - begin) / 1e3, color=COLOURS[phase])
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel(f"milliseconds, one step of rank {args.rank}")
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.spines[["top", "right"]].set_visible(False)
    keys = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[phase]) for phase in WORDS]
    figure.legend(keys, WORDS.values(), loc="outside upper left", ncols=3, frameon=False)
    figure.savefig(args.picture, dpi=120)
    print(f"{args.picture}: step {args.step}, {(end - begin) / 1e3:.1f} ms")


if __name__ == "__main__":
    main()
