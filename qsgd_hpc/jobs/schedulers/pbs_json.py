"""Read the JSON of qstat, also if it is invalid. Pure.

qstat writes values that look like numbers without quotes, exactly as the user wrote them: the
variable ``RUN=005``, a job with the name ``nan``, an empty value. Its backslashes need not escape
anything. If a value cannot be read at all, only the job that contains it is not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Shown", "read"]

# An id as the key of an object. Quotes in a value follow a backslash.
_JOB = re.compile(r'(?<!\\)"([0-9]+(?:\[[0-9]*\])?\.[^"\\\s]+)"\s*:\s*(?=\{)')
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_BARE_END = re.compile(r'["{}\[\],\r\n]')
_END = re.compile(r"\}\s*\}\s*\}\s*\Z")  # closes a job, the jobs and the answer
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_DEEPEST = 20


@dataclass(frozen=True)
class Shown:
    """The attributes of each job, by its id.

    ``unread``: jobs whose attributes cannot be read. ``complete``: false if the answer was
    truncated; the job in which it ends is then omitted.
    """

    jobs: Mapping[str, Mapping[str, Any]]
    unread: frozenset[str] = frozenset()
    complete: bool = True


def read(text: str) -> Shown | None:
    """Return the jobs in the output of ``qstat -f -F json``; None if none can be read.

    Of a truncated answer, the complete jobs are read.
    """
    try:
        content = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return _pieces(text)
    if not isinstance(content, dict):
        return None
    listed = content.get("Jobs", {})
    listed = listed if isinstance(listed, dict) else {}
    jobs = {key: fields for key, fields in listed.items() if isinstance(fields, dict)}
    return Shown(jobs, frozenset(listed) - frozenset(jobs))


def _pieces(text: str) -> Shown | None:
    """Read each job separately, from its id to the next id."""
    heads = list(_JOB.finditer(text))
    if not heads:
        return None
    complete = _END.search(text) is not None
    jobs: dict[str, Mapping[str, Any]] = {}
    unread = set()
    for head, end in zip(heads, [*(head.start() for head in heads[1:]), len(text)], strict=True):
        try:
            jobs[head[1]], _ = _value(text[head.end() : end], 0, 0)
        except ValueError:
            if complete or end < len(text):
                unread.add(head[1])
    return Shown(jobs, frozenset(unread), complete)


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Return the value that begins at a position, and the position after it.

    Raises:
        ValueError: there is no complete value.
    """
    at = _after_space(text, at)
    if depth > _DEEPEST:
        raise ValueError("too deep")
    if text.startswith("{", at):
        return _object(text, at + 1, depth)
    if text.startswith("[", at):
        return _list(text, at + 1, depth)
    if text.startswith('"', at):
        return _string(text, at)
    end = _BARE_END.search(text, at)
    if end is None:
        raise ValueError("cut off")
    word = text[at : end.start()].strip()
    return (int(word) if _INTEGER.fullmatch(word) else word), end.start()


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _after_space(text, at)
    while not text.startswith("}", at):
        name, at = _string(text, at)
        found[name], at = _value(text, _past(text, at, ":"), depth + 1)
        at = _separated(text, at, "}")
    return found, at + 1


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found = []
    at = _after_space(text, at)
    while not text.startswith("]", at):
        value, at = _value(text, at, depth + 1)
        found.append(value)
        at = _separated(text, at, "]")
    return found, at + 1


def _string(text: str, at: int) -> tuple[str, int]:
    match = _STRING.match(text, _after_space(text, at))
    if match is None:
        raise ValueError("no string")
    return _ESCAPE.sub(_unescaped, match[1]), match.end()


def _unescaped(match: re.Match[str]) -> str:
    word = match[1]
    if word[0] == "u" and len(word) == 5:
        return chr(int(word[1:], 16))
    if word in '"\\/':
        return word
    return _ESCAPED.get(word, match[0])


def _separated(text: str, at: int, end: str) -> int:
    """Return the position of the next entry, or of the end of all entries."""
    at = _after_space(text, at)
    return at if text.startswith(end, at) else _after_space(text, _past(text, at, ","))


def _past(text: str, at: int, mark: str) -> int:
    at = _after_space(text, at)
    if not text.startswith(mark, at):
        raise ValueError(f"no {mark}")
    return at + 1


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at
