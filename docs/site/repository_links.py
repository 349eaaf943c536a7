"""Lets links to the repository's files and folders mean the same on the site as on a code host.

A file that is no page (a YAML, a report, a script) is copied to the same place of the site. A
folder leads to its README; where it has none, there is nothing to show and the text stays plain.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx


def mend_links(app: Sphinx, doctree: nodes.document) -> None:
    """Resolve what Sphinx would offer as a download or not find at all."""
    here = Path(app.srcdir, app.env.docname).parent
    for node in list(doctree.findall(addnodes.download_reference)):
        target = Path(os.path.normpath(here / node["reftarget"]))
        node.replace_self(
            nodes.reference("", "", *node.children, refuri=node["reftarget"], internal=True)
        )
        copied = Path(app.outdir, target.relative_to(app.srcdir))
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, copied)
    for node in list(doctree.findall(addnodes.pending_xref)):
        target = Path(os.path.normpath(here / node["reftarget"]))
        if node.get("reftype") == "myst" and node["refdomain"] != "doc" and target.is_dir():
            page = app.env.path2doc(str(target / "README.md"))
            if page in app.env.found_docs:
                node["refdomain"], node["reftarget"], node["reftargetid"] = "doc", page, None
            else:
                node.replace_self(node.children)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx, before its own collector of downloads."""
    app.connect("doctree-read", mend_links, priority=400)
    return {"parallel_read_safe": True}
