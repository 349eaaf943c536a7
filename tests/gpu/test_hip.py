"""The kernels compile for AMD's GPUs by the command of an installation with QSGD_GPU=hip.

They are not run: that needs such a GPU. `make hip` installs the compilers.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from building.compiler import choose
from building.kernels import HIP_TARGETS, kernel_compiler
from tests.core.build import ROOT

NEWER_CLANG = "clang++-19"
DEVICE_CODE = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")  # functions that clang links in
RUNTIME = r"libamdhip64\.so\.\d+|lib(c|m|gcc_s|stdc\+\+)\.so\.\d+"
KERNELS = (
    "scale_kernel",
    "encode_small",
    "encode_large",
    "decode_kernel",
    "encode_rotated",
    "decode_rotated",
    "judge_buckets",
)
BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
ELF_OF_AMD = b"\x7fELF\x02\x01\x01\x40"

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),  # half a minute of compiling for each GPU, where nothing else runs
    pytest.mark.skipif(not shutil.which("hipcc"), reason="no hipcc; `make hip` installs one"),
]


def newer_hipcc(folder: Path) -> None:
    """Make a hipcc that knows all our targets, as that of ROCm 6, of a newer clang.

    The functions that clang links in are those of Debian's ROCm, which has none for MI300: what is
    for its predecessor differs in a number alone.
    """
    code = folder / "bitcode"
    code.mkdir()
    for each in DEVICE_CODE.iterdir():
        (code / each.name).symlink_to(each)
    mi300 = code / "oclc_isa_version_942.bc"
    if not mi300.exists():
        mi300.symlink_to(DEVICE_CODE / "oclc_isa_version_940.bc")
    hipcc = folder / "hipcc"
    words = f'{NEWER_CLANG} --rocm-device-lib-path={code} "$@" -lamdhip64'
    hipcc.write_text(f"#!/bin/sh\nexec {words}\n")
    hipcc.chmod(0o755)


@dataclass(frozen=True)
class Compiled:
    library: Path
    targets: tuple[str, ...]

    def code_objects(self) -> dict[str, bytes]:
        """Return what the library has for each GPU."""
        content = self.library.read_bytes()
        found = {}
        for match in re.finditer(BUNDLE, content):
            bundle, at = content[match.start() :], len(BUNDLE)
            (entries,) = struct.unpack_from("<Q", bundle, at)
            at += 8
            for _ in range(entries):
                begin, size, length = struct.unpack_from("<QQQ", bundle, at)
                at += 24
                name = bundle[at : at + length].decode()
                at += length
                if size:
                    found[name.rpartition("-")[2]] = bundle[begin : begin + size]
        return found

    def tell(self, tool: str, *options: str) -> str:
        command = [tool, *options, self.library]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module", params=["hipcc", "a newer hipcc"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("hip")
    environ = {**os.environ, "QSGD_GPU": "hip"}
    if request.param != "hipcc":
        if not (shutil.which(NEWER_CLANG) and DEVICE_CODE.is_dir()):
            pytest.skip(f"no {NEWER_CLANG} beside Debian's hipcc; `make hip` installs both")
        newer_hipcc(folder)
        environ["PATH"] = f"{folder}:{environ['PATH']}"
    compiler = kernel_compiler(environ)
    assert compiler is not None
    library = folder / "libkernels.so"
    for command in compiler.commands(library, choose()):
        subprocess.run(command, cwd=ROOT, check=True)
    known = [target for target in HIP_TARGETS if f"--offload-arch={target}" in compiler.command]
    return Compiled(library, HIP_TARGETS if request.param != "hipcc" else tuple(known))


def test_there_is_code_of_every_kernel_for_each_gpu(compiled):
    found = compiled.code_objects()
    assert set(found) == set(compiled.targets)
    for target, code in found.items():
        assert code.startswith(ELF_OF_AMD), target
        for kernel in KERNELS:
            assert kernel.encode() in code, (target, kernel)


def test_the_library_says_what_it_is_for_on_a_machine_without_a_gpu(compiled):
    class Head(ctypes.Structure):
        _fields_ = [("version", ctypes.c_int), ("platform", ctypes.c_char_p)]

    library = ctypes.CDLL(str(compiled.library), os.RTLD_NOW)
    library.qsgd_gpu_library.restype = ctypes.POINTER(Head)
    platform = library.qsgd_gpu_library().contents.platform.decode()
    assert re.fullmatch(r"HIP [\d.?]+: " + ", ".join(compiled.targets), platform)


def test_it_shows_its_table_and_needs_only_the_runtime_of_hip(compiled):
    shown = compiled.tell("nm", "--dynamic", "--defined-only", "--format=just-symbols").split()
    # hipcc's own of kernels and of the source; templates of the C++ library, which are weak.
    handles = "|".join((*KERNELS, "__hip_cuid_", "^_ZNK?St"))
    assert [name for name in shown if not re.search(handles, name)] == ["qsgd_gpu_library"]
    needed = re.findall(r"NEEDED.*\[(.+)\]", compiled.tell("readelf", "--dynamic", "--wide"))
    assert any(name.startswith("libamdhip64") for name in needed)
    assert [name for name in needed if not re.fullmatch(RUNTIME, name)] == []
