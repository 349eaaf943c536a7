"""The facts of a profile that its sources do not confirm. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qsgd_hpc.jobs.merge import Merged
from qsgd_hpc.jobs.yaml_lines import Path

__all__ = ["dotted", "unconfirmed"]


def unconfirmed(profile: Merged) -> list[Path]:
    """Return the values marked with ``verify``, in the order of the file.

    ``verify: true`` marks its mapping; a list at the top level marks these keys, if present.
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
    """Return a path in dotted form: ``queues.debug.nodes``."""
    return ".".join(map(str, path)) or "the whole profile"
