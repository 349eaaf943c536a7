"""Edits of a text by offset; all other text keeps its bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Edit", "apply"]


@dataclass(frozen=True)
class Edit:
    """Replace text[start:end] by `text`; with start == end, insert it.

    Attributes:
        order: order of several insertions at one place, smaller ones first.
    """

    start: int
    end: int
    text: str
    order: int = 0


def apply(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with all edits made.

    Insertions inside of a replaced part are dropped; replaced parts must not overlap.
    """
    parts, position = [], 0
    for edit in sorted(edits, key=lambda e: (e.start, e.end > e.start, e.order)):
        if edit.start < position and edit.start == edit.end:
            continue
        assert edit.start >= position, f"edits overlap at {edit.start}: {edit.text!r}"
        parts += [text[position : edit.start], edit.text]
        position = edit.end
    return "".join([*parts, text[position:]])
