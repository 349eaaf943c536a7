"""Choice of the compiler of the GPU kernels and of its targets.

QSGD_GPU=auto uses nvcc if it is found, none builds no kernels; cuda and hip require nvcc and hipcc.
QSGD_GPU_TARGETS names targets instead of all that the compiler supports: sm_90 (machine code) or
compute_80 (PTX) for nvcc, gfx90a for hipcc, with commas.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from building.compiler import Compiler, architecture

__all__ = ["HIP_TARGETS", "NO_KERNELS", "SOURCES", "KernelCompiler", "kernel_compiler"]

# 80 and 90 are A100 and H100, which most centres have; 75 is for small cards. Drivers compile the
# PTX of the last target for newer GPUs.
CUDA_TARGETS = (70, 75, 80, 90)
HIP_TARGETS = ("gfx90a", "gfx942")  # MI250X, MI300
NO_KERNELS = "or build without GPU kernels: QSGD_GPU=none"
SOURCES = ("csrc/gpu/codec.cu",)


@dataclass(frozen=True)
class KernelCompiler:
    """A compiler for GPUs.

    Attributes:
        path: path of nvcc or hipcc.
        command: command that compiles the kernels for all targets that it supports.
        hip: whether it is hipcc.
    """

    path: str
    command: tuple[str, ...]
    hip: bool = False

    def commands(self, library: Path, host: Compiler) -> list[list[str]]:
        """Return the commands that compile and link the kernels, for the root of the sources.

        Beside the library, they leave a list of the files that it depends on, with suffix .d.

        For CUDA, ziglang links them if it is the C++ compiler: nvcc would link them to symbols of
        this machine's glibc, and the library could not be loaded with an older one. nvcc compiles
        with g++ and its C++ library, which ziglang does not link: -z defs lets the link fail if
        the kernels need it.
        """
        listed = ["-MMD", "-MF", str(library.with_suffix(".d"))]
        words = [*self.command, *listed, "-std=c++17", "-O3", "-Icsrc", *SOURCES]
        if not host.target or self.hip:
            return [[*words, "-shared", "-o", str(library)]]
        compiled = str(library.with_suffix(".o"))
        link = [*host.command, *host.link_flags, "-shared", "-Wl,-z,defs", compiled,
                *self._static_runtime()]  # fmt: skip
        return [[*words, "-c", "-o", compiled], [*link, "-o", str(library)]]

    def _static_runtime(self) -> list[str]:
        """Return the flags that link CUDA's runtime as nvcc does."""
        shown = subprocess.run(
            [self.path, "--dryrun", *SOURCES], capture_output=True, text=True, check=True
        )
        folders = re.findall(r'"(-L[^"]+)"', shown.stderr)
        return [*folders, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


def kernel_compiler(environ: Mapping[str, str] = os.environ) -> KernelCompiler | None:
    """Return the compiler of the kernels; None if there is none, or none is wanted.

    Raises:
        SystemExit: the requested compiler is missing, or supports none of the GPUs.
    """
    wanted = environ.get("QSGD_GPU", "auto")
    if architecture(environ.get("QSGD_TARGET", "")) != platform.machine():
        return None
    if wanted not in ("auto", "none", "cuda", "hip"):
        raise SystemExit(f"QSGD_GPU={wanted}: expected auto, none, cuda or hip")
    path = environ.get("PATH")
    targets = [name for name in environ.get("QSGD_GPU_TARGETS", "").split(",") if name]
    if wanted == "hip":
        hipcc = shutil.which("hipcc", path=path) or shutil.which("/opt/rocm/bin/hipcc")
        if not hipcc:
            raise SystemExit(f"QSGD_GPU=hip: hipcc is not on PATH. Load the module, {NO_KERNELS}")
        return _hip(hipcc, targets)
    home = environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = environ.get("CUDACXX") or shutil.which("nvcc", path=path)
    nvcc = nvcc or shutil.which(f"{home}/bin/nvcc")
    if wanted == "cuda" and not nvcc:
        raise SystemExit(f"QSGD_GPU=cuda: nvcc is not on PATH. Load the module, {NO_KERNELS}")
    if wanted == "auto" and not shutil.which(environ.get("NVCC_CCBIN") or "gcc", path=path):
        return None  # nvcc needs a host compiler
    return _cuda(nvcc, targets) if nvcc and wanted != "none" else None


def _cuda(nvcc: str, targets: Sequence[str]) -> KernelCompiler:
    """Return nvcc with these targets, or with all that it supports; CUDA 13 has dropped sm_70."""

    def ask(option: str) -> str:
        return subprocess.run([nvcc, option], capture_output=True, text=True, check=True).stdout

    known = {int(number) for number in re.findall(r"compute_(\d+)", ask("--list-gpu-arch"))}
    if not targets:
        numbers = [number for number in CUDA_TARGETS if number in known] or [max(known)]
        targets = [*(f"sm_{number}" for number in numbers), f"compute_{numbers[-1]}"]
    names = {f"{kind}_{number}" for kind in ("sm", "compute") for number in known}
    if unknown := [name for name in targets if name not in names]:
        raise SystemExit(
            f"QSGD_GPU_TARGETS={','.join(unknown)}: {nvcc} supports {', '.join(sorted(names))}"
        )
    codes = [f"-gencode=arch=compute_{name.rpartition('_')[2]},code={name}" for name in targets]
    machine_code = [name for name in targets if name.startswith("sm_")]
    words = [", ".join(machine_code), "PTX" if len(machine_code) < len(targets) else ""]
    release = re.search(r"release ([\d.]+)", ask("--version"))
    built = f"CUDA {release[1] if release else '?'}: {' and '.join(filter(None, words))}"
    command = (nvcc, "--threads=0", "--fmad=false", "-cudart=static", _define_built(built),
               "-Xcompiler=-fPIC,-fvisibility=hidden", *codes)  # fmt: skip
    return KernelCompiler(nvcc, command)


def _hip(hipcc: str, wanted: Sequence[str]) -> KernelCompiler:
    """Return hipcc with these targets, or with all that it supports; before ROCm 6, not gfx942."""
    # If CUDA is installed, hipcc would compile for that by default.
    words = ("env", "HIP_PLATFORM=amd", hipcc, "-x", "hip")

    def ask(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*words, *options], capture_output=True, text=True, check=False)

    asked, targets, why = wanted or HIP_TARGETS, [], ""
    for target in asked:
        tried = ask(f"--offload-arch={target}", "-fsyntax-only", os.devnull)
        if tried.returncode == 0:
            targets.append(target)
        else:
            why = (tried.stderr.strip().splitlines() or ["no message"])[-1]
    if not targets or (wanted and len(targets) < len(wanted)):
        missing = [target for target in asked if target not in targets]
        raise SystemExit(
            f"QSGD_GPU=hip: {hipcc} does not compile for {', '.join(missing)} ({why}). "
            f"Load another module, {NO_KERNELS}"
        )
    release = re.search(r"HIP version: (\d+\.\d+)", ask("--version").stdout)
    built = f"HIP {release[1] if release else '?'}: {', '.join(targets)}"
    command = (*words, "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", _define_built(built),
               *(f"--offload-arch={target}" for target in targets))  # fmt: skip
    return KernelCompiler(hipcc, command, hip=True)


def _define_built(built: str) -> str:
    """Return the option that stores in the kernels what they were compiled for."""
    return f'-DQSGD_GPU_BUILT="{built}"'
