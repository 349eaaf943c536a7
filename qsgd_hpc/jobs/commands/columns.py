"""Tables for terminals of any width, with a defined order in which columns shrink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["Column", "fitting_table", "screen"]

GAP = 2
FILE_WIDTH = 200


def screen() -> Console:
    """Return the console: as wide as the terminal, or wide if there is none."""
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        least: the least width in terminal columns; None: it cannot be shortened.
        value: columns with the least value are omitted first; None: never.
        wraps: whether it is wrapped instead of truncated.
        right: whether it is right-aligned, for numbers.
    """

    title: str
    least: int | None = None
    value: int | None = None
    wraps: bool = False
    right: bool = False


def fitting_table(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int) -> Table:
    """Return a table with at most this width in terminal columns.

    Columns are shortened, from the last to the first; if that is not enough, columns are omitted,
    and the remaining ones are wrapped.
    """
    full, least = {}, {}
    for i, column in enumerate(columns):
        full[i] = max([Text(column.title).cell_len, *(row[i].cell_len for row in rows)])
        least[i] = full[i] if column.least is None else min(column.least, full[i])
    shown = list(full)
    while sum(least[i] + GAP for i in shown) - GAP > width:
        optional = [i for i in shown if columns[i].value is not None]
        if not optional:
            break
        shown.remove(min(optional, key=lambda i: columns[i].value or 0))
    over = sum(full[i] + GAP for i in shown) - GAP - width
    given = {}
    for i in reversed(shown):
        given[i] = full[i] - min(max(0, over), full[i] - least[i])
        over -= full[i] - given[i]
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for i in shown:
        table.add_column(
            columns[i].title,
            justify="right" if columns[i].right else "left",
            width=None if over > 0 else given[i],
            no_wrap=over <= 0 and not columns[i].wraps,
            overflow="ellipsis" if over <= 0 else "fold",
        )
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table
