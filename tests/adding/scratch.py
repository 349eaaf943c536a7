"""A copy of the sources, to which something is added by the steps of docs/design.md alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Scratch", "Toy", "before", "documented"]

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
FOLDERS = (
    "benchmarks",
    "building",
    "csrc",
    "docs",
    "jobs",
    "qsgd_hpc",
    "scaling",
    "templates",
    "tests",
)
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")
LEFT_OUT = ("*.so", "*.png", "__pycache__", "build", "studies")


@dataclass(frozen=True)
class Toy:
    """What is added: the files of ``toys/NAME``, and lines of files that are there.

    Attributes:
        edits: (file, text that stands in it once, what is to stand there).
        command: words for Python, run in the copy after that.
    """

    name: str
    edits: tuple[tuple[str, str, str], ...]
    command: tuple[str, ...] = ()


def before(file: str, place: str, text: str) -> tuple[str, str, str]:
    """Return the edit that puts text in front of what stands there."""
    return file, place, text + place


def documented(heading: str, name: str) -> set[str]:
    """Return the files that the steps below a heading name, for something of this name."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {heading}\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    assert section is not None, heading
    steps = re.findall(r"^(\d+)\. `([^`]+)`", section[1], re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    return {re.sub(r"\bX\b", name, file) for _, file in steps}


class Scratch:
    """The copy; its package is found before the installed one."""

    def __init__(self, root: Path) -> None:
        """Copy the sources to a folder that is not there yet."""
        self.root = root
        for name in FOLDERS:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for name in FILES:
            shutil.copy2(ROOT / name, root / name)

    def install(self, compiled: Path = ROOT / "qsgd_hpc") -> None:
        """Put data where a wheel has it, and the compiled modules of a ``qsgd_hpc``."""
        package = self.root / "qsgd_hpc"
        for name in ("jobs", "scaling", "templates"):
            (package / "_data" / name).symlink_to(self.root / name)
        for file in compiled.rglob("*.so"):
            (package / file.relative_to(compiled)).symlink_to(file)

    def compile(self) -> None:
        """Compile the core, quickly rather than fast, and install it."""
        built = self.root.with_name("built")
        words = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(built), ".")
        self.run(*words, QSGD_CXXFLAGS="-O0", QSGD_GPU="none")
        with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
            wheel.extractall(built)
        self.install(built / "qsgd_hpc")

    def add(self, toy: Toy) -> set[str]:
        """Carry a toy's steps out; return the files that are new or have changed."""
        before = self._state()
        shutil.copytree(HERE / "toys" / toy.name, self.root, dirs_exist_ok=True)
        for name, old, new in toy.edits:
            file = self.root / name
            text = file.read_text(encoding="utf-8")
            assert text.count(old) == 1, f"{name} has {old!r} {text.count(old)} times"
            file.write_text(text.replace(old, new), encoding="utf-8")
        if toy.command:
            self.run(*toy.command)
        return {name for name, state in self._state().items() if before.get(name) != state}

    def _state(self) -> dict[str, tuple[int, int]]:
        found = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                file = Path(folder, name)
                facts = file.stat()
                key = str(file.relative_to(self.root))
                if "__pycache__" not in key:
                    found[key] = (facts.st_mtime_ns, facts.st_size)
        return found

    def run(self, *words: str, cwd: Path | None = None, **variables: str) -> str:
        """Run Python on the copy, and in it; return what it prints.

        Raises:
            AssertionError: it failed.
        """
        places = (self.root, HERE / "installed")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "PYTHONDONTWRITEBYTECODE": "1",
            **variables,
        }
        done = subprocess.run(
            [sys.executable, *words],
            cwd=cwd or self.root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return done.stdout
