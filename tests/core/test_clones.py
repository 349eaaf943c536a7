"""Which of a function's compiled forms runs here: the best that this CPU can run, of any maker."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.core.build import ROOT, native_compiler

pytestmark = [
    pytest.mark.serial,
    pytest.mark.gate,
    pytest.mark.skipif(
        platform.machine() != "x86_64"
        or not Path("/proc/cpuinfo").exists()
        or not shutil.which("nm"),
        reason="elsewhere there is one form; nm lists them",
    ),
]

# As the psABI of x86-64 lists them, by the kernel's names.
LEVELS = {
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
    "x86-64-v3": "avx avx2 bmi1 bmi2 f16c fma abm movbe",
}
SOURCE = """
#include <cstddef>
#include "common/clones.h"
extern "C" {
QSGD_CLONES float sum(const float* x, size_t n) {
  float s = 0;
  for (size_t i = 0; i < n; ++i) s += x[i];
  return s;
}
__attribute__((visibility("default"))) void* chosen() { return reinterpret_cast<void*>(&sum); }
}
"""


def symbols(library: Path) -> dict[str, int]:
    listed = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout
    # Clang writes x86-64-v4, GCC x86_64_v4.
    found = re.findall(r"^(\w+) [tTi] (\S+)$", listed, re.M)
    return {name.replace("-", "_"): int(at, 16) for at, name in found}


def landing(address: int) -> int:
    """Return where a jump through a table, if there is one at this address, goes to."""
    code = ctypes.string_at(address, 6)
    if code[:2] != b"\xff\x25":
        return address
    entry = address + len(code) + int.from_bytes(code[2:], "little", signed=True)
    return ctypes.c_uint64.from_address(entry).value


def check_best_form(compiler: Sequence[str], folder: Path) -> None:
    """Compile a function in several forms: the best that this CPU can run must be chosen."""
    (folder / "sum.cc").write_text(SOURCE)
    library = folder / "libsum.so"
    words = ["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{ROOT / 'csrc'}"]
    sources = [folder / "sum.cc", ROOT / "csrc" / "common" / "cpu.cc"]
    subprocess.run([*compiler, *words, *sources, "-o", library], check=True)
    known = symbols(library)
    forms = {
        name: at
        for name, at in known.items()
        if name.startswith("sum.") and name not in ("sum.ifunc", "sum.resolver")
    }
    if not any("default" in name for name in forms):
        pytest.skip("this compiler makes one form of a function")

    loaded = ctypes.CDLL(str(library))
    loaded.chosen.restype = ctypes.c_void_p
    base = ctypes.cast(loaded.chosen, ctypes.c_void_p).value - known["chosen"]
    (chosen,) = (name for name, at in forms.items() if at == landing(loaded.chosen()) - base)

    flags = set(re.search(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)[1].split())
    best = [level for level, needed in LEVELS.items() if flags.issuperset(needed.split())]
    feature = {"x86-64-v4": "avx512f", "x86-64-v3": "avx2"}  # a compiler that knows no levels
    names = [n for level in best[:1] for n in (f"arch_{level.replace('-', '_')}", feature[level])]
    assert any(name in chosen for name in names or ["default"]), (chosen, best)


def test_the_best_form_for_this_cpu_is_chosen(tmp_path):
    check_best_form(native_compiler(), tmp_path)
