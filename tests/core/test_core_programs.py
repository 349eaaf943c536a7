"""The C++ programs that test the core, and are run with sanitizers, keep up with its sources."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.core.build import native_compiler

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.name for path in (ROOT / "tests" / "core").glob("*.cc"))


@pytest.mark.full
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_compiles(name: str, tmp_path: Path) -> None:
    # ziglang has no -fsyntax-only.
    command = [*native_compiler(), "-std=c++17", "-O0", "-Icsrc", "-c", f"tests/core/{name}"]
    command += ["-o", str(tmp_path / "program.o")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
