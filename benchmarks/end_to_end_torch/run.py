#!/usr/bin/env python3
"""Run train.py on 2 and 4 hosts at several rates and on 2 ranks in shared memory; keep the results.

    benchmarks/end_to_end_torch/run.py --data data

Each piece takes about `--seconds` and is written to ../results immediately, so that an interrupted
run keeps its results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
FOLDERS = {"resnet": "cifar10", "lstm": "ptb", "mnist": "mnist"}
RATES = {"100mbit": "100 Mb/s", "1gbit": "1 Gb/s", "10gbit": "10 Gb/s"}


@dataclass(frozen=True)
class Piece:
    """One table."""

    task: str
    ranks: int
    batch: int
    network: str | None = None
    """Network between the ranks, each on a separate host; None: shared memory of one host."""

    @property
    def name(self) -> str:
        """Return the stem of its files."""
        place = self.network or "shared-memory"
        return f"end-to-end-{self.task}-{self.ranks}-{place}-batch{self.batch}"


# With small batches, communication is most of a step; with large ones, a small part.
PIECES = [
    *(
        Piece(task, ranks, batch, network)
        for task, batch in (("mnist", 64), ("resnet", 2), ("resnet", 32), ("lstm", 4))
        for ranks in (2, 4)
        for network in RATES
    ),
    Piece("mnist", 2, 64), Piece("resnet", 2, 4), Piece("resnet", 2, 32), Piece("lstm", 2, 8),
]  # fmt: skip


def command(piece: Piece, options: argparse.Namespace) -> list[str]:
    """Return the command that runs one piece."""
    place = f"hosts at {RATES[piece.network]}" if piece.network else "ranks in shared memory"
    train = [
        *(sys.executable, str(HERE / "train.py"), "--task", piece.task),
        *("--batch", str(piece.batch), "--seconds", str(options.seconds)),
        *("--where", f"{piece.ranks} {place}"),
        *("--json", str(RESULTS / f"{piece.name}.json")),
    ]
    if options.data:
        train += ["--data", str((options.data / FOLDERS[piece.task]).resolve())]
    network = ["--network", piece.network] if piece.network else []
    run = [sys.executable, "-m", "qsgd_hpc", "run", "-np", str(piece.ranks), *network]
    return [*run, *train]


def main() -> int:
    """Run the pieces one after another; return the worst exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="has mnist, cifar10 and ptb; default: random data"
    )
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
