"""Programs of the tests, compiled with parts of the core."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from building.compiler import choose

__all__ = ["ROOT", "build", "native_compiler", "sources_of"]

ROOT = Path(__file__).parents[2]


def native_compiler() -> list[str]:
    """Return the command of this machine's C++ compiler, or of the one that stands in for it."""
    own = shutil.which("g++") or shutil.which("c++")
    return [own] if own else list(choose().command)


def sources_of(folders: Iterable[str]) -> list[Path]:
    """Return the sources in these folders of the core."""
    return [p for folder in folders for p in sorted((ROOT / "csrc" / folder).glob("*.cc"))]


def build(
    program: Path,
    compiler: Sequence[str],
    flags: Sequence[str],
    sources: Iterable[Path],
    *link: str,
) -> None:
    """Compile the sources, as many at once as there are cores, and link them."""
    words = [*compiler, "-std=c++17", "-ffp-contract=off", f"-I{ROOT / 'csrc'}", *flags]

    def compile_one(source: Path) -> str:
        target = program.parent / f"{source.parent.name}-{source.stem}.o"
        subprocess.run([*words, "-c", source, "-o", target], check=True)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    subprocess.run([*words, *objects, "-o", program, *link, "-pthread"], check=True)
