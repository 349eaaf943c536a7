"""Read YAML into plain data with the line of every key, for error messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from qsgd_hpc.errors import UsageError

__all__ = ["Document", "parse"]

Path = tuple[str | int, ...]
# Aliases can contain themselves, or expand to more than fits into memory.
DEEPEST, MOST_VALUES = 50, 100_000


@dataclass(frozen=True)
class Document:
    """Plain data and, for each path into it, the line (from 1) of its key or item."""

    data: Any
    lines: dict[Path, int] = field(default_factory=dict)

    def line(self, path: Path) -> int:
        """Return the line of ``path``, or of its nearest ancestor."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def parse(text: str) -> Document:
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
    lines: dict[Path, int] = {}
    data = {} if root is None else _build(root, (), lines)
    return Document(data, lines)


def _build(node: yaml.Node, path: Path, lines: dict[Path, int]) -> Any:
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
            here: Path = (*path, key)
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
