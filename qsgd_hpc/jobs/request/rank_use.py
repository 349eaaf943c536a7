"""Detect scripts that use no MPI ranks, from their imports, without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

__all__ = ["may_use_ranks"]

_RANKS = frozenset({"horovod", "qsgd_hpc", "mpi4py", "mpi4jax", "petsc4py", "deepspeed"})
# Modules and functions that can import or start anything.
_ANYTHING = frozenset({"importlib", "runpy", "subprocess"})
_CALLS = frozenset({"__import__", "exec", "eval"})


def may_use_ranks(script: Path) -> bool:
    """Return whether a script, or a module of its folder that it imports, may use ranks.

    Also True if it is unknown: the script cannot be read, computes module names when it
    runs, starts programs, or changes the module search path.
    """
    seen: set[Path] = set()
    left = [script]
    while left:
        file = left.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return True
        if any(map(_imports_unknown, ast.walk(tree))):
            return True
        for level, name in _imported(tree):
            if not level and name.partition(".")[0] in _RANKS | _ANYTHING:
                return True
            parents = file.parents
            folder = parents[min(level, len(parents)) - 1] if level else script.parent
            left += _files_of(folder, name)
    return False


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield imports as (leading dots, name); for `from a import b` also a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names)
            yield from ((node.level, name) for name in (node.module, *names) if name)


def _imports_unknown(node: ast.AST) -> bool:
    """Return whether an expression may import or start unknown modules."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in _CALLS
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        name = node.attr
        return (node.value.id == "sys" and name == "path") or (
            node.value.id == "os" and name.startswith(("exec", "spawn", "system", "popen"))
        )
    return False


def _files_of(folder: Path, name: str) -> Iterator[Path]:
    """Yield the files of a module and of its parent packages in a folder, if they exist."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        base = folder.joinpath(*parts[:i])
        yield from (
            f for f in (base.with_name(f"{base.name}.py"), base / "__init__.py") if f.is_file()
        )
