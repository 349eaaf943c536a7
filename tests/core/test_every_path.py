"""One noise, one rounding: every instruction set codes the same data to the same bytes.

Those of this machine, and those of an ARMv8 where a cross compiler and QEMU are installed (`make
arm`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qsgd_hpc import _core

ROOT = Path(__file__).parents[2]
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"


def digests(folder: Path, compiler: str, *emulator: str) -> dict[str, list[str]]:
    """Compile the program and return, by instruction set, the digests of all its cases."""
    sources = [
        *sorted((ROOT / "csrc" / "quant").glob("*.cc")),
        *sorted((ROOT / "csrc" / "common").glob("*.cc")),
        ROOT / "tests" / "core" / "every_path.cc",
    ]

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        run([compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno",
             f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(target)])  # fmt: skip
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    program = folder / "every_path"
    run([compiler, "-static", *objects, "-o", str(program), "-pthread"])
    found = defaultdict(list)
    for line in run([*emulator, str(program)]).splitlines():
        name, case = line.split(" ", 1)
        found[name].append(case)
    return found


def run(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "the package could not have been built without a C++ compiler"
    return digests(tmp_path_factory.mktemp("here"), compiler)


def test_every_instruction_set_of_this_machine_gives_the_same_bytes(here):
    assert list(here) == _core.instruction_sets()
    for name, cases in here.items():
        assert cases == here["scalar"], name
        assert len(cases) > 1000


@pytest.mark.skipif(
    not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)),
    reason="no cross compiler and emulator for ARM; `make arm` installs them",
)
def test_an_arm_gives_the_bytes_of_this_machine(here, tmp_path):
    found = digests(tmp_path, ARM_COMPILER, ARM_EMULATOR)
    assert list(found) == ["neon", "scalar"]
    assert found["neon"] == here["scalar"]
    assert found["scalar"] == here["scalar"]
