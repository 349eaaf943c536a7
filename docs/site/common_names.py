"""Describes each public name once, though many modules export it.

What all framework modules share stands on the page of common names, the errors with the package,
and the choices of ``hvd.Compression`` on the page of codes.
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

from qsgd_hpc.frameworks import common
from qsgd_hpc.launch.frameworks import FRAMEWORKS

COMMON = "docs/reference/common"
PAGES = ("docs/reference/arrays", *(f"docs/reference/{each.module}" for each in FRAMEWORKS))


def skip_common(
    app: Sphinx, what: str, name: str, found: Any, skip: bool, options: Any
) -> bool | None:
    """Leave a shared name out of a page that is not its own."""
    page = app.env.docname
    if page == COMMON:
        return getattr(found, "__module__", None) == "qsgd_hpc.errors" or None
    if page in PAGES:
        shared = found is getattr(common, name, None)  # JAX has its own init and shutdown
        return shared or name in ("Compression", "HostsUpdatedInterrupt") or None
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("autodoc-skip-member", skip_common)
    return {"parallel_read_safe": True}
