"""Makes signatures readable whose defaults are objects: ``Progress(...)``, and ``...`` alone."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

# "<factory>" of a dataclass, "<JobState.QUEUED: 'QUEUED'>": no Python, so Sphinx cannot parse it.
NO_PYTHON = re.compile(r"<[^<>]*>")
CALL = re.compile(r"(= ?\w+)\((?:[^()]|\(\))+\)")


def shorten(
    app: Sphinx,
    what: str,
    name: str,
    found: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
    """Replace what stands for an object that is made anew."""
    if not signature:
        return None
    return CALL.sub(r"\1(...)", NO_PYTHON.sub("...", signature)), returns


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("autodoc-process-signature", shorten)
    return {"parallel_read_safe": True}
