#!/usr/bin/env python3
"""Run train.py on 2 and 4 hosts at 1 Gb/s and on 2 ranks in shared memory; write the results.

    benchmarks/end_to_end_torch/run.py --data data

Each piece takes about `--seconds` and is written to ../results at once, so that a run which is cut
short keeps what it has.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
FOLDERS = {"resnet": "cifar10", "lstm": "ptb"}


@dataclass(frozen=True)
class Piece:
    """One table."""

    task: str
    ranks: int
    batch: int
    hosts: bool

    @property
    def name(self) -> str:
        """Return the stem of its files."""
        place = "1gbit" if self.hosts else "shared-memory"
        return f"end-to-end-{self.task}-{self.ranks}-{place}-batch{self.batch}"


# Small batches make communication most of a step, large ones little of it.
PIECES = [
    Piece("resnet", 2, 2, True), Piece("resnet", 2, 32, True), Piece("resnet", 4, 2, True),
    Piece("lstm", 2, 4, True), Piece("lstm", 4, 4, True),
    Piece("resnet", 2, 4, False), Piece("resnet", 2, 32, False), Piece("lstm", 2, 8, False),
]  # fmt: skip


def command(piece: Piece, options: argparse.Namespace) -> list[str]:
    """Return what runs one piece."""
    place = "hosts at 1 Gb/s" if piece.hosts else "ranks in shared memory"
    train = [
        *(sys.executable, str(HERE / "train.py"), "--task", piece.task),
        *("--batch", str(piece.batch), "--seconds", str(options.seconds)),
        *("--where", f"{piece.ranks} {place}"),
        *("--json", str(RESULTS / f"{piece.name}.json")),
    ]
    if options.data:
        train += ["--data", str((options.data / FOLDERS[piece.task]).resolve())]
    network = ["--network", "1gbit"] if piece.hosts else []
    run = [sys.executable, "-m", "qsgd_hpc", "run", "-np", str(piece.ranks), *network]
    return [*run, *train]


def main() -> int:
    """Run the pieces one after another; return the worst exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="has cifar10 and ptb; default: random data")
    parser.add_argument("--seconds", type=float, default=90, help="of a piece (default 90)")
    parser.add_argument("--only", metavar="TEXT", default="", help="in the names of pieces to run")
    options = parser.parse_args()
    worst = 0
    for piece in PIECES:
        if options.only not in piece.name:
            continue
        done = subprocess.run(command(piece, options), stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        if done.returncode == 0:
            (RESULTS / f"{piece.name}.txt").write_text(done.stdout)
        worst = max(worst, abs(done.returncode))
    return worst


if __name__ == "__main__":
    sys.exit(main())
