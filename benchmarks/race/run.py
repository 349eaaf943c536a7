#!/usr/bin/env python3
"""Race on both tracks, time the steps on each network, and print the tables.

    benchmarks/race/run.py --data data

The number of steps does not depend on the network, so entrants train once, in shared memory; the
time of a step is measured on each network. Results are written to ../results/race-*.json
immediately, and an interrupted run can be resumed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
TRACKS = ("shakespeare", "ptb")
NETWORKS = ("100mbit", "1gbit")
RANKS = 2


def main() -> int:
    """Run the pieces one after another; return the first exit code that is not zero."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="has shakespeare and ptb; default: random data")
    parser.add_argument("--results", type=Path, default=RESULTS, help="output folder")
    parser.add_argument("--seeds", type=int, default=10, help="(default 10)")
    parser.add_argument("--steps", type=int, help="of the base (default: the track's)")
    args = parser.parse_args()
    files = {track: args.results / f"race-{track}.json" for track in TRACKS}
    for track, file in files.items():
        train = [str(HERE / "train.py"), "--track", track, "--json", str(file)]
        train += ["--seeds", str(args.seeds)]
        if args.data:
            train += ["--data", str(args.data.resolve())]
        if args.steps:
            train += ["--steps", str(args.steps)]
        start = [sys.executable, "-m", "qsgd_hpc", "run", "-np", str(RANKS)]
        pieces = [[*start, *train]]
        pieces += [[*start, "--network", n, *train, "--times", n] for n in NETWORKS]
        for piece in pieces:
            code = subprocess.run(piece).returncode
            if code:
                return code
    report = [sys.executable, str(HERE / "report.py"), *map(str, files.values())]
    return subprocess.run([*report, "--png", str(args.results / "race.png")]).returncode


if __name__ == "__main__":
    sys.exit(main())
