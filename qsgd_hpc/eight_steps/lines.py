"""Lines as Python's parser counts them: they end in "\\n", "\\r\\n" or a lone "\\r", nowhere else.

`str.splitlines()` splits at ten other characters, too, of which a comment or a string may hold any.
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
    """Return how much of a line its last leading form feed ends, 0 without one.

    Python counts the indentation from behind it.
    """
    found = MARGIN.match(line)
    return found.end() if found else 0


def without_form_feeds(text: str) -> tuple[str, tuple[int, ...]]:
    """Remove the margin from each line, because libcst loses, doubles or rejects it.

    Returns:
        the text, and how many characters each line lost.
    """
    if "\f" not in text:
        return text, ()
    ends = [*END.findall(text), ""]
    whole = lines(text)
    # A line of nothing else stays, blank: between "\r" and "\n" it keeps these from becoming one.
    whole = [" " * len(line) if margin(line) == len(line) else line for line in whole]
    lost = tuple(margin(line) for line in whole)
    kept = (f"{line[n:]}{end}" for line, n, end in zip(whole, lost, ends, strict=True))
    return "".join(kept), lost


def diff(before: str, after: str, name: str, new_name: str) -> str:
    """Return the difference of two texts as `diff -u` shows it, to whom only "\\n" ends a line."""
    found = difflib.unified_diff([*_kept(before)], [*_kept(after)], name, new_name)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in found
    )


def _kept(text: str) -> Iterator[str]:
    return (each[0] for each in re.finditer(r"[^\n]*\n|[^\n]+", text))
