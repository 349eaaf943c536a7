"""The C++ programs that test the core, and are run with sanitizers, keep up with its sources."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.core.build import native_compiler

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.name for path in (ROOT / "tests" / "core").glob("*.cc"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_compiles(name: str) -> None:
    command = [*native_compiler(), "-std=c++17", "-fsyntax-only", "-Icsrc", f"tests/core/{name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
