"""The facts of a profile that its sources do not confirm. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qsgd_hpc.jobs.merge import Merged
from qsgd_hpc.jobs.yaml_lines import Path

__all__ = ["dotted", "unconfirmed"]


def unconfirmed(profile: Merged) -> list[Path]:
    """Return where ``verify`` stands at a value, in the order of the file.

    ``verify: true`` marks the mapping it is in; a list at the top marks those keys, if they are
    there.
    """
    marks = profile.data.get("verify")
    listed = [(key,) for key in marks if key in profile.data] if isinstance(marks, list) else []
    return [*listed, *_marked(profile.data, ())]


def _marked(data: Any, path: Path) -> Iterator[Path]:
    if isinstance(data, dict):
        if data.get("verify") is True:
            yield path
        for key, value in data.items():
            yield from _marked(value, (*path, key))


def dotted(path: Path) -> str:
    """Return a path as a person writes it: ``queues.debug.nodes``."""
    return ".".join(map(str, path)) or "the whole profile"
