"""The core under the address, undefined-behaviour and thread sanitizers, with real threads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("quant", "transport", "collectives", "engine")


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_core_is_clean_under(sanitizers, tmp_path):
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "the package could not have been built without a C++ compiler"
    sources = [p for folder in FOLDERS for p in (ROOT / "csrc" / folder).glob("*.cc")]
    program = tmp_path / "stress"
    # Function clones are resolved before the thread sanitizer has started, which crashes it.
    flags = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-ffp-contract=off",
             "-DQSGD_NO_CLONES", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all",
             f"-I{ROOT / 'csrc'}"]  # fmt: skip
    stress = str(Path(__file__).with_name("stress.cc"))
    subprocess.run(
        [compiler, *flags, stress, *map(str, sources), "-o", program, "-ldl", "-pthread"],
        check=True,
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "ok\n"
