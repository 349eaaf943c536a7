"""The files of profiles: found, read with the line of every value, and merged.

A profile's files, in this order: included, a site's package, the user's, the project's.
"""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import yaml
from yaml.constructor import SafeConstructor

from qsgd_hpc import env
from qsgd_hpc._data import data as shipped
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.sites.schema import Position, overlaid, profile_faults
from qsgd_hpc.jobs.words import did_you_mean, listing

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = [
    "GROUP",
    "Document",
    "Merged",
    "Origin",
    "Source",
    "dotted",
    "merged",
    "names",
    "package_faults",
    "parse_yaml",
    "sources",
    "unconfirmed",
]

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


# Aliases can contain themselves, or expand to more than fits into memory.
DEEPEST, MOST_VALUES = 50, 100_000


@dataclass(frozen=True)
class Document:
    """Plain data and, for each path into it, the line (from 1) of its key or item."""

    data: Any
    lines: dict[Position, int] = field(default_factory=dict)

    def line(self, path: Position) -> int:
        """Return the line of ``path``, or of its nearest ancestor."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def parse_yaml(text: str) -> Document:
    """Return the document in ``text``.

    Raises:
        UsageError: not YAML, a duplicate key, or too large; the message starts with ``line N: ``.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = mark.line + 1 if mark else 1
        raise UsageError(
            f"line {where}: not valid YAML: {error.problem or error.context}"
        ) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"line 1: not valid YAML: {error}") from None
    lines: dict[Position, int] = {}
    data = {} if root is None else _build(root, (), lines)
    return Document(data, lines)


def _build(node: yaml.Node, path: Position, lines: dict[Position, int]) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if len(path) > DEEPEST or len(lines) > MOST_VALUES:
        raise UsageError(
            f"line {node.start_mark.line + 1}: more than {DEEPEST} levels or {MOST_VALUES} values; "
            "does an alias (*name) contain itself?"
        )
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            here: Position = (*path, key)
            line = key_node.start_mark.line + 1
            if key in mapping:
                first = lines[here]
                raise UsageError(f"line {line}: key '{key}' is duplicated, first in line {first}")
            lines[here] = line
            mapping[key] = _build(value_node, here, lines)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*path, i), lines) for i, item in enumerate(node.value)]
    return SafeConstructor().construct_object(node)


# Not inherited through `extends`: they identify the machine that a profile describes.
_OWN = ("extends", "embedded_default", "generic", "login_env", "login_hosts", "retired")


@dataclass(frozen=True)
class Origin:
    """The position of a value."""

    where: str
    line: int
    layer: str

    def __str__(self) -> str:
        return f"{self.where}:{self.line}"


@dataclass(frozen=True)
class Merged:
    """A profile's merged data, and the origin of each value."""

    name: str
    data: dict[str, Any]
    origins: Mapping[Position, Origin]

    def origin(self, path: Position) -> Origin:
        """Return the origin of ``path`` or its nearest ancestor."""
        while path not in self.origins:
            path = path[:-1]
        return self.origins[path]


def merged(name: str) -> Merged:
    """Read a profile: the profile that it extends, then its files from the included to the
    project's.

    Mappings merge key by key, other values are replaced; null unsets a key.

    Raises:
        UsageError: unknown name, cyclic ``extends``, or all faults with file, line and key.
    """
    return _merged(name, ())


def _merged(name: str, children: tuple[str, ...]) -> Merged:
    # Job ids and file names contain the name.
    files = sources(name) if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", name) else []
    if not files:
        raise UsageError(f"unknown site '{name}'. {did_you_mean(name, names())}")
    parts = [(file, _parsed(name, file)) for file in files]
    data = [d.data for _, d in parts if isinstance(d.data, dict)]
    bases = [each["extends"] for each in data if "extends" in each]
    base = bases[-1] if bases else None
    for i, (file, document) in enumerate(parts):
        faults = profile_faults(document.data, partial=i > 0 or base is not None)
        _refuse(name, ((file.where, document.line(path), text) for path, text in faults))
    result = Merged(name, {}, {(): Origin(files[0].where, 1, files[0].layer)})
    if base is not None:
        result = _base(
            name, base, children, next(p for p in reversed(parts) if "extends" in p[1].data)
        )
    for file, document in parts:
        result = _over(result, file, document)
    whole = profile_faults(result.data)
    wheres = [file.where for file in files]
    _refuse(name, ((*_blamed(result.origin(path), wheres), text) for path, text in whole))
    return result


def _blamed(origin: Origin, wheres: Sequence[str]) -> tuple[str, int]:
    """Return file and line of a fault; the value that contradicts it may be in another file."""
    others = [where for where in wheres if where != origin.where]
    also = f", together with {listing(others, 'and')}" if others else ""
    return f"{origin.where}{also}", origin.line


def _base(name: str, base: str, children: tuple[str, ...], part: tuple[Source, Document]) -> Merged:
    """Return the profile that ``name`` extends, without the keys that identify its machine."""
    file, document = part
    where = f"line {document.line(('extends',))}"
    circle = (*children, name, base)
    if base in circle[:-1]:
        raise UsageError(
            f"site '{name}', {where}: the profiles extend each other cyclically: "
            f"{' -> '.join(circle[circle.index(base) :])} (in {file.where})"
        )
    if base not in names():
        raise UsageError(
            f"site '{name}', {where}: it extends the unknown site '{base}'. "
            f"{did_you_mean(base, names())} (in {file.where})"
        )
    found = _merged(base, (*children, name))
    data = {key: value for key, value in found.data.items() if key not in _OWN}
    top = {(): Origin(file.where, 1, file.layer)}
    kept = {path: origin for path, origin in found.origins.items() if path and path[0] in data}
    return Merged(name, data, top | kept)


def _parsed(name: str, file: Source) -> Document:
    try:
        return parse_yaml(file.text)
    except UsageError as error:
        raise UsageError(f"site '{name}', {error} (in {file.where})") from None


def _refuse(name: str, faults: Iterable[tuple[str, int, str]]) -> None:
    found = sorted(faults)
    if found:
        raise UsageError(
            "\n".join(
                f"site '{name}', line {line}: {text} (in {where})" for where, line, text in found
            )
        )


def _over(below: Merged, file: Source, document: Document) -> Merged:
    """Return ``below`` overridden by the keys of a file."""
    data = overlaid(below.data, document.data)
    added = {
        path: Origin(file.where, line, file.layer) for path, line in document.lines.items() if path
    }
    return Merged(below.name, data, {**below.origins, **added})


def unconfirmed(profile: Merged) -> list[Position]:
    """Return the values marked with ``verify``, in the order of the file.

    ``verify: true`` marks its mapping; a list at the top level marks these keys, if present.
    """
    marks = profile.data.get("verify")
    listed = [(key,) for key in marks if key in profile.data] if isinstance(marks, list) else []
    return [*listed, *_marked(profile.data, ())]


def _marked(data: Any, path: Position) -> Iterator[Position]:
    if isinstance(data, dict):
        if data.get("verify") is True:
            yield path
        for key, value in data.items():
            yield from _marked(value, (*path, key))


def dotted(path: Position) -> str:
    """Return a path in dotted form: ``queues.debug.nodes``."""
    return ".".join(map(str, path)) or "the whole profile"
