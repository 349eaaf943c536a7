"""Lines as counted by Python's parser: they end only in "\\n", "\\r\\n" or a single "\\r".

`str.splitlines()` also splits at ten other characters, which comments and strings may contain.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

__all__ = ["diff", "lines", "margin", "starts", "without_form_feeds"]

END = re.compile(r"\r\n?|\n")
MARGIN = re.compile(r"[ \t\f]*\f")


def lines(text: str) -> list[str]:
    """Return the lines of a text without line ends; the last is empty after a line end."""
    return END.split(text)


def starts(text: str) -> tuple[int, ...]:
    """Return the offset of each line in a text."""
    return (0, *(each.end() for each in END.finditer(text)))


def margin(line: str) -> int:
    """Return the length of a line up to and including its last leading form feed, 0 without one.

    Python counts the indentation from there.
    """
    found = MARGIN.match(line)
    return found.end() if found else 0


def without_form_feeds(text: str) -> tuple[str, tuple[int, ...]]:
    """Remove the margin from each line, because libcst loses, doubles or rejects it.

    Returns:
        The text, and the number of characters removed from each line; empty without form feeds.
    """
    if "\f" not in text:
        return text, ()
    ends = [*END.findall(text), ""]
    found = lines(text)
    # A line that is all margin becomes spaces: if empty, a "\r" before it and the "\n" after it
    # would become one line end.
    found = [" " * len(line) if margin(line) == len(line) else line for line in found]
    lost = tuple(margin(line) for line in found)
    kept = (f"{line[n:]}{end}" for line, n, end in zip(found, lost, ends, strict=True))
    return "".join(kept), lost


def diff(before: str, after: str, name: str, new_name: str) -> str:
    """Return the difference of two texts as `diff -u`, for which only "\\n" ends a line."""
    found = difflib.unified_diff([*_kept(before)], [*_kept(after)], name, new_name)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in found
    )


def _kept(text: str) -> Iterator[str]:
    return (each[0] for each in re.finditer(r"[^\n]*\n|[^\n]+", text))
