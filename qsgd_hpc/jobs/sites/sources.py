"""Locations of profiles, in this order: included, a site's package, the user's, the project's."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from qsgd_hpc import env
from qsgd_hpc._data import data as shipped
from qsgd_hpc.errors import UsageError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = ["GROUP", "Source", "names", "package_faults", "sources"]

GROUP = "qsgd_hpc.sites"
PROJECT_FOLDER = Path(".qsgd-hpc") / "sites"


@dataclass(frozen=True)
class Source:
    """One file of a profile. ``layer`` is shipped, package NAME, user or project."""

    layer: str
    where: str
    text: str


def sources(name: str) -> list[Source]:
    """Return the files of a profile, the lowest layer first; [] if it is unknown."""
    return [_read(name, layer, file) for layer, file in _files() if _stem(file) == name]


def names() -> list[str]:
    """Return the names of all profiles, sorted."""
    return sorted({_stem(file) for _, file in _files()})


def package_faults() -> list[str]:
    """Return the faults of packages with profiles, one sentence for each."""
    return [found for _, found in _packages() if isinstance(found, str)]


def _files() -> Iterator[tuple[str, Traversable]]:
    for layer, folder in _folders():
        try:
            found = [f for f in folder.iterdir() if f.name.endswith(".yaml") and f.is_file()]
        except OSError:
            continue  # most users have no folder for profiles
        yield from ((layer, f) for f in sorted(found, key=lambda f: f.name))


def _folders() -> Iterator[tuple[str, Traversable]]:
    yield "shipped", shipped("jobs")
    for name, folder in _packages():
        if not isinstance(folder, str):
            yield f"package {name}", folder
    yield "user", env.home() / "sites"
    project = _project_folder(Path.cwd())
    if project is not None:
        yield "project", project


def _project_folder(start: Path) -> Path | None:
    """Return the nearest .qsgd-hpc/sites at or above a folder, as git finds its repository."""
    # The user's own folder may have this name, too.
    own = {env.home(), Path(os.path.expanduser(env.TABLE["QSGD_HOME"].default))}  # noqa: PTH111
    skipped = {folder.resolve() / "sites" for folder in own}
    for parent in (start, *start.parents):
        folder = parent / PROJECT_FOLDER
        # Jobs execute lines of profiles, so a folder in which anyone can write (/tmp) is ignored.
        if folder.is_dir() and folder.resolve() not in skipped and not _is_world_writable(parent):
            return folder
    return None


def _is_world_writable(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IWOTH)


@functools.cache
def _packages() -> tuple[tuple[str, Traversable | str], ...]:
    """Return (entry point, its folder or its fault), sorted by name."""
    found = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return tuple((point.name, _folder_of(point)) for point in found)


def _folder_of(point: EntryPoint) -> Traversable | str:
    what = f"package entry point '{point.name} = {point.value}' in group '{GROUP}'"
    try:
        target = point.load()
    except Exception as error:  # a faulty package must not disable other sites
        return f"{what} cannot be loaded: {type(error).__name__}: {error}. Reinstall its package."
    if isinstance(target, ModuleType):
        if hasattr(target, "__path__"):
            return files(target)
        target = Path(target.__file__ or "").parent
    if isinstance(target, (str, PathLike)) and Path(target).is_dir():
        return Path(target)
    return (
        f"{what} is not a folder. It must be a package, or the path of a folder, with YAML files."
    )


def _stem(file: Traversable) -> str:
    return Path(file.name).stem


def _read(name: str, layer: str, file: Traversable) -> Source:
    try:
        return Source(layer, str(file), file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"site '{name}': cannot read {file}: {error}") from None
