"""The core under the address, undefined-behaviour and thread sanitizers, with real threads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.core.build import build, native_compiler, sources_of

pytestmark = pytest.mark.serial

FOLDERS = ("common", "quant", "transport", "collectives", "planner", "engine")


def build_stress(program: Path, sanitizers: str) -> None:
    """Compile the core and its stress program."""
    # Function clones are resolved before the thread sanitizer has started, which crashes it.
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", "-DQSGD_NO_CLONES",
             f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]  # fmt: skip
    sources = [*sources_of(FOLDERS), *Path(__file__).parent.glob("stress*.cc")]
    build(program, native_compiler(), flags, sources, "-ldl")


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here, whose sanitizers these are")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_core_is_clean_under(sanitizers, tmp_path):
    build_stress(tmp_path / "stress", sanitizers)
    done = subprocess.run(
        [tmp_path / "stress", tmp_path], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "ok\n"
