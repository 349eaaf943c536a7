"""The core under the address, undefined-behaviour and thread sanitizers, with real threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.core.build import build, native_compiler, sources_of

pytestmark = pytest.mark.serial

FOLDERS = ("common", "quant", "transport", "collectives", "planner", "gpu", "engine")


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
def test_core_is_clean_under(sanitizers, tmp_path, twin):
    build_stress(tmp_path / "stress", sanitizers)
    # The twin is compiled without, so that its locks and sockets are not seen.
    known = tmp_path / "known"
    known.write_text("race:gpu_twin::\n", encoding="utf-8")
    options = os.environ | {"TSAN_OPTIONS": f"suppressions={known}"}
    for kernels in ([], [twin]):
        done = subprocess.run(
            [tmp_path / "stress", tmp_path, *kernels], capture_output=True, text=True, timeout=900,
            check=False, env=options,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stdout == "ok\n"
