"""Print the results of trainings with every code as Markdown.

    python benchmarks/accuracy/report.py benchmarks/results/accuracy-*.json

A line has the two trainings with a code: without and with error feedback.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from codes import FEEDBACK
from tables import markdown

__all__ = ["HEADINGS", "lines", "title"]

HEADINGS = (
    "code",
    "accuracy",
    "with feedback",
    "sent KB",
    "of fp32",
    "NMSE",
    "NMSE with feedback",
)
Row = dict[str, Any]


def title(record: dict[str, Any]) -> str:
    """Return the title, with the settings of all rows."""
    return (
        f"{record['task']}: {record['parameters']:,} parameters, {record['images']:,} images, "
        f"{record['epochs']} epochs, batch {record['batch']} on each of {record['ranks']} ranks; "
        f"accuracy on {record['test_images']:,} test images"
    )


def lines(record: dict[str, Any]) -> list[list[str]]:
    """Return the table: its heading, then a line for a code, without and with error feedback."""
    pairs: dict[str, dict[bool, Row]] = {}
    for row in record["rows"]:
        feeds_back = bool(row["error_feedback"])
        pairs.setdefault(row["what"].removesuffix(FEEDBACK), {})[feeds_back] = row
    plain = pairs.get("fp32", {}).get(False)
    rest = [_line(name, rows.get(False), rows.get(True), plain) for name, rows in pairs.items()]
    return [list(HEADINGS), *rest]


def _line(name: str, without: Row | None, feedback: Row | None, plain: Row | None) -> list[str]:
    row = without or feedback
    assert row is not None
    return [
        name,
        _accuracy(without),
        _accuracy(feedback),
        f"{row['wire_bytes'] / 1e3:.1f}",
        f"{row['wire_bytes'] / plain['wire_bytes']:.1%}" if plain else "",
        _nmse(without),
        _nmse(feedback),
    ]


def _accuracy(row: Row | None) -> str:
    if row is None:
        return ""
    text = f"{row['test_accuracy']:.2%}"
    return f"{text} (not finite after {row['steps']} steps)" if row["diverged"] else text


def _nmse(row: Row | None) -> str:
    return "" if row is None or row["nmse"] is None else f"{row['nmse']:.2g}"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        record = json.loads(Path(path).read_text())
        print(markdown(title(record), lines(record)), end="\n\n")
