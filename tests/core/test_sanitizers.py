"""The core under the address, undefined-behaviour and thread sanitizers, with real threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("common", "quant", "transport", "collectives", "planner", "engine")


def build(program: Path, sanitizers: str) -> None:
    """Compile the core and its stress program, as many files at once as there are cores."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "the package could not have been built without a C++ compiler"
    # Function clones are resolved before the thread sanitizer has started, which crashes it.
    flags = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-ffp-contract=off",
             "-DQSGD_NO_CLONES", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all",
             f"-I{ROOT / 'csrc'}"]  # fmt: skip
    sources = [p for folder in FOLDERS for p in sorted((ROOT / "csrc" / folder).glob("*.cc"))]

    def compile_one(source: Path) -> str:
        target = program.parent / f"{source.parent.name}-{source.stem}.o"
        subprocess.run([compiler, *flags, "-c", source, "-o", target], check=True)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, [*sources, *Path(__file__).parent.glob("stress*.cc")]))
    subprocess.run([compiler, *flags, *objects, "-o", program, "-ldl", "-pthread"], check=True)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_core_is_clean_under(sanitizers, tmp_path):
    build(tmp_path / "stress", sanitizers)
    done = subprocess.run(
        [tmp_path / "stress", tmp_path], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "ok\n"
