"""A table of text, on a terminal and in Markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

__all__ = ["markdown", "show"]

Lines = Sequence[Sequence[str]]
FILE_WIDTH = 120


def markdown(title: str, lines: Lines) -> str:
    """Return the table for a page; the first line is its heading."""
    heading, *rest = lines
    table = [heading, ["---"] * len(heading), *rest]
    return "\n".join([f"{title}:", "", *(f"| {' | '.join(line)} |" for line in table)])


def show(title: str, lines: Lines) -> None:
    """Print the table on a terminal or into a file."""
    heading, *rest = lines
    table = Table(box=None, pad_edge=False)
    for word in heading:
        table.add_column(word, justify="left" if word == heading[0] else "right")
    for line in rest:
        table.add_row(*line)
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    console.print(title, end="\n\n", soft_wrap=True, highlight=False)
    console.print(table)
