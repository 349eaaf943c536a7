"""Choice of the compiler of the GPU kernels and of its targets.

QSGD_GPU=auto uses nvcc if it is found, none builds no kernels; cuda and hip require nvcc and hipcc.
QSGD_GPU_TARGETS names targets instead of all that the compiler supports: sm_90 (machine code) or
compute_80 (PTX) for nvcc, gfx90a for hipcc, with commas. For another processor than this machine's
(QSGD_TARGET), nvcc needs a GCC for it, such as aarch64-linux-gnu-g++, and QSGD_CUDA_RUNTIME: the
folder with its libcudart_static.a.
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

__all__ = [
    "HIP_TARGETS",
    "NO_KERNELS",
    "SOURCES",
    "KernelCompiler",
    "cross_compiler",
    "kernel_compiler",
]

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
        release: its version, such as 13.0.
        hip: whether it is hipcc.
        runtime: folder of CUDA's static library, if the target is another processor.
    """

    path: str
    command: tuple[str, ...]
    release: str
    hip: bool = False
    runtime: str = ""

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
        folders = [f"-L{self.runtime}"] if self.runtime else steps_of(self.path, r'"(-L[^"]+)"')
        return [*folders, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


def steps_of(nvcc: str, pattern: str) -> list[str]:
    """Return the matches of a pattern in the commands that nvcc would run for this processor."""
    command = [nvcc, "--dryrun", *SOURCES]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(dict.fromkeys(re.findall(pattern, shown.stderr)))


def cross_compiler(target: str) -> str:
    """Return the GCC that nvcc needs for a target of ziglang; empty for this processor."""
    processor = architecture(target)
    return f"{processor}-linux-gnu-g++" if processor != platform.machine() else ""


def kernel_compiler(environ: Mapping[str, str] = os.environ) -> KernelCompiler | None:
    """Return the compiler of the kernels; None if there is none, or none is wanted.

    Raises:
        SystemExit: the requested compiler is missing, or supports none of the GPUs.
    """
    wanted = environ.get("QSGD_GPU", "auto")
    if wanted not in ("auto", "none", "cuda", "hip"):
        raise SystemExit(f"QSGD_GPU={wanted}: expected auto, none, cuda or hip")
    path = environ.get("PATH")
    cross = cross_compiler(environ.get("QSGD_TARGET", ""))
    runtime = environ.get("QSGD_CUDA_RUNTIME", "") if cross else ""
    if cross and wanted == "cuda" and not (runtime and shutil.which(cross, path=path)):
        raise SystemExit(
            f"QSGD_GPU=cuda: kernels for {environ['QSGD_TARGET']} need {cross} on PATH, and "
            f"libcudart_static.a for it in the folder that QSGD_CUDA_RUNTIME names, {NO_KERNELS}"
        )
    if cross and (not runtime or wanted == "hip"):
        return None
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
    host = cross or environ.get("NVCC_CCBIN") or "gcc"
    if wanted == "auto" and not shutil.which(host, path=path):
        return None  # nvcc needs a host compiler
    return _cuda(nvcc, targets, cross, runtime) if nvcc and wanted != "none" else None


def _cuda(nvcc: str, targets: Sequence[str], cross: str, runtime: str) -> KernelCompiler:
    """Return nvcc with these targets, or with all that it supports; CUDA 13 has dropped sm_70.

    Args:
        nvcc: its path.
        targets: names of GPUs; empty: all.
        cross: the GCC of another processor; empty: kernels for this one.
        runtime: folder of that processor's libcudart_static.a.
    """

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
    version = release[1] if release else "?"
    command = [nvcc, "--threads=0", "--fmad=false", "-cudart=static",
               _define_built(f"CUDA {version}: {' and '.join(filter(None, words))}"),
               "-Xcompiler=-fPIC,-fvisibility=hidden", *codes]  # fmt: skip
    if cross:  # nvcc would look for the headers, which are the same, in that processor's folder
        headers = steps_of(nvcc, r'"-I([^"]+)"') + steps_of(nvcc, r'"-isystem" "([^"]+)"')
        command += ["-ccbin", cross, *(f"-isystem={folder}" for folder in headers)]
    return KernelCompiler(nvcc, tuple(command), version, runtime=runtime)


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
    version = release[1] if release else "?"
    command = (*words, "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
               _define_built(f"HIP {version}: {', '.join(targets)}"),
               *(f"--offload-arch={target}" for target in targets))  # fmt: skip
    return KernelCompiler(hipcc, command, version, hip=True)


def _define_built(built: str) -> str:
    """Return the option that stores in the kernels what they were compiled for."""
    return f'-DQSGD_GPU_BUILT="{built}"'
