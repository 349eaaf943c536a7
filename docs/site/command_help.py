"""Turns the help texts of the commands, which are plain text, into what Sphinx reads.

sphinx-click takes them for reStructuredText: a ``*.py`` would begin an emphasis, two hyphens would
become a dash, and a block that click leaves as it is (after ``\\b``) would be set as verse.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

VERSE = "| "
OPTION = re.compile(r"(?<![\w`-])--[A-Za-z][A-Za-z-]*[A-Za-z]")


def describe(app: Sphinx, context: Any, lines: list[str]) -> None:
    """Escape what is no markup, and show preformatted blocks as listings."""
    text: list[str] = []
    in_block = False
    for line in lines:
        if line.startswith(VERSE):
            if not in_block:
                text += ["", ".. code-block:: console", ""]
            text.append("   " + line.removeprefix(VERSE))
        else:
            text += [""] if in_block else []
            text.append(_plain(line))
        in_block = line.startswith(VERSE)
    lines[:] = text


def explain_options(app: Sphinx, context: Any, lines: list[str]) -> None:
    """Escape what is no markup in the sentences about options."""
    lines[:] = [line if line.lstrip().startswith("..") else _plain(line) for line in lines]


def _plain(line: str) -> str:
    return OPTION.sub(r"``\g<0>``", line.replace("*", r"\*"))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("sphinx-click-process-description", describe)
    app.connect("sphinx-click-process-options", explain_options)
    return {"parallel_read_safe": True}
