"""Choose what compiles the GPU kernels, and what it compiles them for.

QSGD_GPU=auto takes nvcc where it is, none takes nothing; cuda and hip insist on nvcc and on hipcc.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from building.compiler import Compiler, architecture

__all__ = ["HIP_TARGETS", "NO_KERNELS", "SOURCES", "KernelCompiler", "kernel_compiler"]

# A100 and H100 are what the centres have; 75 stands for small cards. From PTX of the last one a
# driver makes code for newer GPUs.
CUDA_TARGETS = (70, 75, 80, 90)
HIP_TARGETS = ("gfx90a", "gfx942")  # MI250X, MI300
NO_KERNELS = "or build without GPU kernels: QSGD_GPU=none"
SOURCES = ("csrc/gpu/codec.cu",)


@dataclass(frozen=True)
class KernelCompiler:
    """A compiler for GPUs.

    Attributes:
        path: nvcc or hipcc.
        command: what compiles the kernels by it, for all targets that it knows.
        hip: whether it is hipcc.
    """

    path: str
    command: tuple[str, ...]
    hip: bool = False

    def commands(self, library: Path, scratch: Path, host: Compiler) -> list[list[str]]:
        """Return what compiles and links the kernels, to be run at the top of the sources.

        For CUDA they are linked by ziglang where that is the compiler: nvcc would link them to the
        symbols of this machine's glibc, and the library would load with no older one.
        """
        words = [*self.command, "-std=c++17", "-O3", "-Icsrc", *SOURCES]
        if not host.target or self.hip:
            return [[*words, "-shared", "-o", str(library)]]
        compiled = str(scratch / "kernels.o")
        link = [*host.command, *host.link_flags, "-shared", compiled, *self._static_runtime()]
        return [[*words, "-c", "-o", compiled], [*link, "-o", str(library)]]

    def _static_runtime(self) -> list[str]:
        """Return what links CUDA's runtime, as nvcc itself would."""
        shown = subprocess.run(
            [self.path, "--dryrun", *SOURCES], capture_output=True, text=True, check=True
        )
        folders = re.findall(r'"(-L[^"]+)"', shown.stderr)
        return [*folders, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


def kernel_compiler(environ: Mapping[str, str] = os.environ) -> KernelCompiler | None:
    """Return the compiler of the kernels; None: there is none, or none is wanted.

    Raises:
        SystemExit: the one that is asked for is not there, or knows none of the GPUs.
    """
    wanted = environ.get("QSGD_GPU", "auto")
    if architecture(environ.get("QSGD_TARGET", "")) != platform.machine():
        return None
    if wanted not in ("auto", "none", "cuda", "hip"):
        raise SystemExit(f"QSGD_GPU={wanted}: expected auto, none, cuda or hip")
    path = environ.get("PATH")
    if wanted == "hip":
        hipcc = shutil.which("hipcc", path=path) or shutil.which("/opt/rocm/bin/hipcc")
        if not hipcc:
            raise SystemExit(f"QSGD_GPU=hip: hipcc is not on PATH. Load the module, {NO_KERNELS}")
        return _hip(hipcc)
    home = environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = environ.get("CUDACXX") or shutil.which("nvcc", path=path)
    nvcc = nvcc or shutil.which(f"{home}/bin/nvcc")
    if wanted == "cuda" and not nvcc:
        raise SystemExit(f"QSGD_GPU=cuda: nvcc is not on PATH. Load the module, {NO_KERNELS}")
    if wanted == "auto" and not shutil.which(environ.get("NVCC_CCBIN") or "gcc", path=path):
        return None  # nvcc compiles what is for the host by another compiler
    return _cuda(nvcc) if nvcc and wanted != "none" else None


def _cuda(nvcc: str) -> KernelCompiler:
    """Return nvcc with the targets that it knows; CUDA 13, for one, has left out 70."""

    def ask(option: str) -> str:
        return subprocess.run([nvcc, option], capture_output=True, text=True, check=True).stdout

    known = {int(number) for number in re.findall(r"compute_(\d+)", ask("--list-gpu-arch"))}
    targets = [target for target in CUDA_TARGETS if target in known] or [max(known)]
    release = re.search(r"release ([\d.]+)", ask("--version"))
    words = ", ".join(f"sm_{target}" for target in targets)
    codes = [f"-gencode=arch=compute_{t},code=sm_{t}" for t in targets]
    codes.append(f"-gencode=arch=compute_{targets[-1]},code=compute_{targets[-1]}")
    built = f"CUDA {release[1] if release else '?'}: {words} and PTX"
    command = (nvcc, "--threads=0", "--fmad=false", "-cudart=static", _says(built),
               "-Xcompiler=-fPIC,-fvisibility=hidden", *codes)  # fmt: skip
    return KernelCompiler(nvcc, command)


def _hip(hipcc: str) -> KernelCompiler:
    """Return hipcc with the targets that it knows; before ROCm 6, 942 is not among them."""
    # Where it sees CUDA as well, it would compile for that.
    words = ("env", "HIP_PLATFORM=amd", hipcc, "-x", "hip")

    def ask(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*words, *options], capture_output=True, text=True, check=False)

    targets, why = [], ""
    for target in HIP_TARGETS:
        tried = ask(f"--offload-arch={target}", "-fsyntax-only", os.devnull)
        if tried.returncode == 0:
            targets.append(target)
        else:
            why = (tried.stderr.strip().splitlines() or ["it says nothing"])[-1]
    if not targets:
        raise SystemExit(
            f"QSGD_GPU=hip: {hipcc} compiles for none of {', '.join(HIP_TARGETS)} ({why}). "
            f"Load another module, {NO_KERNELS}"
        )
    release = re.search(r"HIP version: (\d+\.\d+)", ask("--version").stdout)
    built = f"HIP {release[1] if release else '?'}: {', '.join(targets)}"
    command = (*words, "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", _says(built),
               *(f"--offload-arch={target}" for target in targets))  # fmt: skip
    return KernelCompiler(hipcc, command, hip=True)


def _says(built: str) -> str:
    """Return the word that has the kernels say what they were compiled for."""
    return f'-DQSGD_GPU_BUILT="{built}"'
