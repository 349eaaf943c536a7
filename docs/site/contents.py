"""Makes the site's navigation of docs/index.md, which is plain Markdown and reads as such.

Each heading of the second level is a part, each list item that begins with a link a page of it. A
lesson that the page does not name is added at the end of the part that names lessons: first those
of its comment "then: ...", as far as they are there, and then all others by name. So a new folder
under tutorials/ needs no change here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

PART = re.compile(r"^## +(.+?)\s*$", re.M)
PAGE = re.compile(r"^- \[([^]]+)\]\(([^)#:]+\.(?:md|rst))\)", re.M)
LESSON = "tutorials/"
THEN = re.compile(r"<!-- then: (.+?) -->", re.S)


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append a hidden table of contents to each part of the first page."""
    if docname != app.config.root_doc:
        return
    folder = Path(app.srcdir, docname).parent
    head, *parts = PART.split(source[0])
    named = {os.path.normpath(folder / target) for _, target in PAGE.findall(source[0])}
    text = [head]
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        if LESSON in body:
            order = [name.strip(", ") for text in THEN.findall(body) for name in text.split()]
            lessons = _unnamed_lessons(Path(app.srcdir, LESSON), named, order)
            body = THEN.sub("", body).rstrip() + "\n"
            for page in lessons:
                body += f"- [{_title(page)}]({os.path.relpath(page, folder)})\n"
        text.append(f"## {title}\n{body.rstrip()}\n\n{_toctree(title, body)}\n")
    source[0] = "\n".join(text)


def _unnamed_lessons(tutorials: Path, named: set[str], order: list[str]) -> list[Path]:
    """Return the lessons' pages that the page does not link, those of the order first."""
    found = {
        str(page.parent.relative_to(tutorials)): page
        for page in sorted(tutorials.rglob("README.md"))
        if str(page) not in named
    }
    return [found.pop(name) for name in order if name in found] + list(found.values())


def _title(page: Path) -> str:
    found = re.search(r"^# +(.+?)\s*$", page.read_text(encoding="utf-8"), re.M)
    return found.group(1) if found else page.parent.name


def _toctree(caption: str, body: str) -> str:
    pages = [f"{title} <{target}>" for title, target in PAGE.findall(body)]
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", add_navigation)
    return {"parallel_read_safe": True}
