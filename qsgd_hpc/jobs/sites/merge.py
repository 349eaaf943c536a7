"""Merge the files of a profile, and keep the file and line of every value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.sites.schema import overlaid, profile_faults
from qsgd_hpc.jobs.sites.sources import Source, names, sources
from qsgd_hpc.jobs.sites.yaml_lines import Document, Path, parse
from qsgd_hpc.jobs.words import did_you_mean, listing

__all__ = ["Merged", "Origin", "dotted", "merged", "unconfirmed"]

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
    origins: Mapping[Path, Origin]

    def origin(self, path: Path) -> Origin:
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
        return parse(file.text)
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
