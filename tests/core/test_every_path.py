"""One noise, one rounding: every instruction set codes the same data to the same bytes.

Those of this machine, and those of an ARMv8 where a cross compiler and QEMU are installed (`make
arm`).
"""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from qsgd_hpc import _core
from tests.core.build import build, native_compiler, sources_of

pytestmark = pytest.mark.serial

ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"


def digests(folder: Path, compiler: list[str], *emulator: str) -> dict[str, list[str]]:
    """Compile the program and return, by instruction set, the digests of all its cases."""
    sources = [*sources_of(("quant", "common")), Path(__file__).parent / "every_path.cc"]
    program = folder / "every_path"
    build(program, compiler, ["-O2", "-fno-math-errno"], sources, "-static")
    found = defaultdict(list)
    done = subprocess.run(
        [*emulator, program], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for line in done.stdout.splitlines():
        name, case = line.split(" ", 1)
        found[name].append(case)
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return digests(tmp_path_factory.mktemp("here"), native_compiler())


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
    found = digests(tmp_path, [ARM_COMPILER], ARM_EMULATOR)
    assert list(found) == ["neon", "scalar"]
    assert found["neon"] == here["scalar"]
    assert found["scalar"] == here["scalar"]
