#!/usr/bin/env python3
"""Compare steps of many small parameters with DDP's, and with another installation's.

    python benchmarks/small/run.py
    python benchmarks/small/run.py --beside ../other/.venv/bin/python

The contestants take turns; the result of each is the median over the rounds of its median step.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

STEP = Path(__file__).with_name("step.py")


def measure(python: str, by: str, options: argparse.Namespace) -> float:
    """Return the median step in microseconds."""
    command = [
        *(python, "-m", "qsgd_hpc", "run", "-np", str(options.np), str(STEP)),
        *("--by", by, "--count", str(options.count), "--elements", str(options.elements)),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    """Let the contestants take turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-np", type=int, default=2, help="ranks")
    parser.add_argument("--count", type=int, default=300, help="parameters")
    parser.add_argument("--elements", type=int, default=256, help="of each, float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--beside", metavar="PYTHON", help="Python of another installation")
    options = parser.parse_args()
    contestants = {"this": (sys.executable, "optimizer"), "DDP over gloo": (sys.executable, "ddp")}
    if options.beside:
        contestants["beside"] = (options.beside, "optimizer")
    seen: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, contestant in contestants.items():
            seen[name].append(measure(*contestant, options))
    own = statistics.median(seen["this"])
    size = 4 * options.elements
    print(f"{options.count} parameters of {size} bytes, {options.np} ranks in shared memory\n")
    print("| | us per step | of the rounds | over this one's |\n|---|---|---|---|")
    for name, found in seen.items():
        median = statistics.median(found)
        print(f"| {name} | {median:.0f} | {min(found):.0f} to {max(found):.0f} | "
              f"{median / own:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
