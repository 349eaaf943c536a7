"""Print the table of this lesson from what the runs recorded: results/NAME.jsonl.

    python table.py [FILE.jsonl ...]

A run that has not ended has the perplexities of its last epoch, and "-" for the test.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

HEADER = ("run", "epochs", "train", "valid", "test", "words/s", "MB/step")


def row(path: Path) -> tuple[str, ...] | None:
    """Return the line of a run; None: it has no epoch behind it."""
    epochs, test = {}, "-"
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "test_perplexity" in record:
            test = f"{record['test_perplexity']:.2f}"
        else:
            epochs[record["epoch"]] = record  # one that was resumed may be there twice
    if not epochs:
        return None
    last = epochs[max(epochs)]
    return (
        path.stem,
        str(max(epochs)),
        f"{last['train_perplexity']:.2f}",
        f"{last['valid_perplexity']:.2f}",
        test,
        f"{statistics.median(e['words_per_s'] for e in epochs.values()):.0f}",
        f"{last.get('wire_bytes_per_step', 0) / 1e6:.2f}",
    )


def table(paths: list[Path]) -> str:
    """Return a line for each run that has one, in the order of the files."""
    lines = [HEADER, *filter(None, map(row, paths))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


if __name__ == "__main__":
    given = [Path(name) for name in sys.argv[1:]]
    print(table(given or sorted((Path(__file__).parent / "results").glob("*.jsonl"))))
