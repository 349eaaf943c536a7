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
    """One column and its cells.

    Attributes:
        least: the least width in terminal columns; None: it cannot be shortened.
        value: columns with the least value are omitted first; None: never.
        wraps: whether it is wrapped instead of truncated.
        right: whether it is right-aligned, for numbers.
    """

    title: str
    cells: Sequence[Text]
    least: int | None = None
    value: int | None = None
    wraps: bool = False
    right: bool = False

    @property
    def natural(self) -> int:
        """Its full width in terminal columns."""
        return max(Text(self.title).cell_len, *(c.cell_len for c in self.cells), 0)

    @property
    def shortest(self) -> int:
        """Its least width in terminal columns."""
        return self.natural if self.least is None else min(self.least, self.natural)


def fitting_table(columns: Sequence[Column], width: int) -> Table:
    """Return a table with at most this width in terminal columns.

    Columns are shortened, from the last to the first; if that is not enough, columns are omitted,
    and the remaining ones are wrapped.
    """
    shown = list(columns)
    while sum(c.shortest + GAP for c in shown) - GAP > width:
        optional = [c for c in shown if c.value is not None]
        if not optional:
            break
        shown.remove(min(optional, key=lambda c: c.value or 0))
    over = sum(c.natural + GAP for c in shown) - GAP - width
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    widths: list[int] = []
    for column in reversed(shown):
        cut = min(max(0, over), column.natural - column.shortest)
        over -= cut
        widths.append(column.natural - cut)
    for column, given in zip(shown, reversed(widths), strict=True):
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            width=None if over > 0 else given,
            no_wrap=over <= 0 and not column.wraps,
            overflow="ellipsis" if over <= 0 else "fold",
        )
    for cells in zip(*(c.cells for c in shown), strict=True):
        table.add_row(*cells)
    return table
