#!/usr/bin/env python3
"""Print, as Markdown, how many times as fast as its peers each exchange trained.

    benchmarks/end_to_end_torch/compare.py benchmarks/results/end-to-end-*.json

The ratios are medians over turns, each of times that were taken one after the other.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

BASE = "gloo DDP fp32"
PEERS = (BASE, "gloo DDP fp16", "gloo DDP PowerSGD 1", "gloo DDP PowerSGD 2")
ALONE = "no exchange"
OURS = ("engine fp32", "engine 4 bit", "DDP hook 4 bit")


def ratio(slow: dict[str, Any], fast: dict[str, Any]) -> float:
    """Return how many times as fast the second row was, turn by turn."""
    pairs = zip(slow["samples_s"], fast["samples_s"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def line(record: dict[str, Any]) -> str:
    """Return the table's line for one record."""
    rows = {row["what"]: row for row in record["rows"]}
    best = min((rows[what] for what in PEERS if what in rows), key=lambda row: row["median_s"])
    share = 1 - ratio(rows[BASE], rows[ALONE]) ** -1
    cells = [
        f"{record['task']}, batch {record['batch']}",
        record["where"],
        f"{share:.0%}",
        *(f"{ratio(rows[BASE], rows[what]):.2f}" for what in OURS),
        f"{ratio(best, rows['engine 4 bit']):.2f} ({best['what'].removeprefix('gloo ')})",
    ]
    return f"| {' | '.join(cells)} |"


def main(paths: list[str]) -> None:
    """Print the table."""
    print(f"| network | where | exchange in a step of {BASE} |", " | ".join(OURS), end="")
    print(" | engine 4 bit over the best peer |\n|---|---|---|", "---|" * (len(OURS) + 1), sep="")
    for path in paths:
        print(line(json.loads(Path(path).read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
