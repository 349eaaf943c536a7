"""Print what the package and some of its extras require, one requirement per line, for pip.

python -m building.needs mpich torch dev
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

__all__ = ["needs"]

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def needs(extras: list[str]) -> list[str]:
    """Return the requirements of the package and of these extras.

    Raises:
        SystemExit: there is no such extra.
    """
    project: dict[str, Any] = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    known = project["optional-dependencies"]
    if missing := [name for name in extras if name not in known]:
        raise SystemExit(
            f"{PROJECT.name} has no extra {', '.join(missing)}; it has {', '.join(known)}"
        )
    return [*project["dependencies"], *(each for name in extras for each in known[name])]


if __name__ == "__main__":
    print("\n".join(needs(sys.argv[1:])))
