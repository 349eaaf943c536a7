"""Sources compiled together: headers and templates are then compiled once for several files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

__all__ = ["PLACE", "units"]

PLACE = "build/units"
MOST = 12  # files in a unit; more take no less time in all, and leave cores idle
MOST_BINDINGS = 3  # each takes as long as ten others


def units(sources: Iterable[str], root: Path) -> list[str]:
    """Write files that include the sources of a folder, and return these and what stays apart.

    A file of kernels stays apart: it sets the instruction set of all that follows in it.

    Args:
        sources: paths of C++ files, relative to the root.
        root: folder of the project.
    """
    apart, folders = [], defaultdict(list)
    for source in sources:
        path = Path(source)
        if path.name.startswith("kernels_"):
            apart.append(source)
        else:
            folders[path.parent.name].append(source)
    written = []
    for folder, members in folders.items():
        most = MOST_BINDINGS if folder == "bindings" else MOST
        number = -(-len(members) // most)
        for each in range(number):
            ours = (Path(member).relative_to("csrc") for member in members[each::number])
            text = "".join(f'#include "{member}"\n' for member in ours)
            path = Path(PLACE, f"{folder}_{each + 1}.cc")
            _keep(root / path, text)
            written.append(str(path))
    return [*sorted(written), *apart]


def _keep(path: Path, text: str) -> None:
    """Write a file unless it has this text: what is older than its object isn't compiled again."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
