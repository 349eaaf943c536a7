"""Build of qsgd_hpc._core, of TensorFlow's operations and, if there is a compiler for GPUs, of the
kernels; packaging of the data. All other metadata is in pyproject.toml.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

from building.compiler import Compiler, architecture, choose
from building.kernels import NO_KERNELS, kernel_compiler
from building.kernels import SOURCES as OF_KERNELS
from building.units import PLACE, units

ROOT = Path(__file__).parent
# A wheel for another processor has that processor in its name and in those of its libraries.
TARGET = os.environ.get("QSGD_TARGET", "")
if architecture(TARGET) != platform.machine():
    os.environ["_PYTHON_HOST_PLATFORM"] = f"linux-{architecture(TARGET)}"
    os.environ["SETUPTOOLS_EXT_SUFFIX"] = sysconfig.get_config_var("EXT_SUFFIX").replace(
        platform.machine(), architecture(TARGET)
    )
# Files for users to read, copy and edit are at the top level, and imported as qsgd_hpc._data.*.
DATA = ("jobs", "templates", "scaling")
OURS = ("csrc/", f"{PLACE}/")


def kept(*how: object) -> Path:
    """Return the folder of what is compiled so: a change compiles only what depends on it."""
    return ROOT / "build" / "objects" / hashlib.sha256(repr(how).encode()).hexdigest()[:12]


def is_stale(compiled: str | Path, source: str = "") -> bool:
    """Return whether a compiled file is older than its source or a header of ours."""
    path = Path(compiled)
    depends = path.with_suffix(".d")  # written by -MMD
    if not path.exists() or not depends.exists():
        return True
    words = depends.read_text().split()
    files = [ROOT / word for word in words if word.startswith(OURS)]
    return any(not p.exists() or p.stat().st_mtime > path.stat().st_mtime for p in files)


# QSGD_CXXFLAGS comes last, to override: -O0 takes a third of the time, for tests of the packaging.
# No implicit fused multiply-add: the same input must give the same bytes on every machine.
FLAGS = ["-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno"]
FLAGS += shlex.split(os.environ.get("QSGD_CXXFLAGS", ""))
SOURCES = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.cc"))
# Built without TensorFlow: it declares the functions it uses, and finds them in the process.
OF_TENSORFLOW = [s for s in SOURCES if s.startswith("csrc/tensorflow/")]

core = Pybind11Extension(
    "qsgd_hpc._core",
    units((s for s in SOURCES if s not in OF_TENSORFLOW), ROOT),
    include_dirs=["csrc"],
    depends=[*SOURCES, *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.h"))],
    cxx_std=17,
    extra_compile_args=FLAGS,
    libraries=["dl"],
)
# Not a Python module: tf.load_op_library() loads it.
tensorflow = Extension(
    "qsgd_hpc.tensorflow._ops",
    units(OF_TENSORFLOW, ROOT),
    include_dirs=["csrc"],
    depends=core.depends,
    extra_compile_args=["-std=c++17", "-g0", "-fvisibility=hidden", *FLAGS],
    libraries=["dl"],
)

# Not a Python module either: qsgd_hpc.runtime.gpu passes it to the core. The CUDA runtime is linked
# statically, so it can be loaded without a GPU; the HIP runtime is the machine's.
KERNELS = "qsgd_hpc._gpu"
for_gpu = kernel_compiler()
kernels = Extension(KERNELS, list(OF_KERNELS), depends=core.depends)


def use(chosen: Compiler, compiler: Any) -> None:
    """Let setuptools compile and link with the chosen compiler.

    Raises:
        SystemExit: it is ziglang but not installed, or the headers of Python are missing.
    """
    print(f"qsgd-hpc: {chosen}", file=sys.stderr)
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").exists():
        raise SystemExit(
            f"{headers}/Python.h is missing, so nothing can be compiled for this Python: install "
            "its headers (python3-dev, python3-devel), or a wheel of qsgd-hpc"
        )
    if chosen.target and not find_spec("ziglang"):
        raise SystemExit(
            f"qsgd-hpc: {chosen.why}: install one, or `pip install ziglang`, which pip does "
            "automatically without --no-build-isolation"
        )
    if not chosen.usual:
        compiler.set_executables(
            compiler_so_cxx=[*chosen.command, *chosen.flags, "-fPIC", "-DNDEBUG"],
            linker_so_cxx=[*chosen.command, *chosen.link_flags, "-shared"],
            compiler_cxx=[],  # else setuptools would link with it and linker_so_cxx's arguments
        )


def keep_bindings_apart(chosen: Compiler, compiler: Any) -> None:
    """Pass the include folders of Python and pybind11 only to the bindings, and less optimisation.

    All other files then have the same command line for every Python, so ziglang, which caches
    objects, compiles them once for all wheels. The bindings' templates take a third of the time
    that the core does, and only pass arguments on.
    """
    compile_one = compiler._compile
    # Debian's pyconfig.h includes another by its path below /usr/include, which ziglang skips.
    system = Path(sysconfig.get_path("include")).parent
    behind = ["-idirafter", str(system)] if chosen.target else []

    def compile_source(
        obj: str, src: str, ext: str, cc_args: list[str], flags: list[str], *rest: Any
    ) -> None:
        if src.startswith(f"{PLACE}/bindings_"):
            flags = ["-O1" if word == "-O3" else word for word in flags] + behind
        else:
            cc_args = [word for word in cc_args if word == "-Icsrc" or not word.startswith("-I")]
        compile_one(obj, src, ext, cc_args, flags, *rest)

    compiler._compile = compile_source


class BuildExtensions(build_ext):
    """Compiles C++ with the chosen compiler, and the kernels with theirs."""

    def build_extensions(self) -> None:
        self.chosen = choose()
        use(self.chosen, self.compiler)
        keep_bindings_apart(self.chosen, self.compiler)
        if not self.chosen.target:  # ziglang has a cache of its own, and would miss headers in it
            for each in (core, tensorflow):
                each.extra_compile_args.append("-MMD")
            if self.editable_mode:
                python = (sys.implementation.cache_tag, pybind11.__version__)
                self.build_temp = str(kept(python, self.chosen.command, FLAGS))
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        if ext.name != KERNELS:
            super().build_extension(ext)
            return
        target = Path(self.get_ext_fullpath(ext.name))
        # The same for every Python, one of which starts ziglang.
        built = kept(for_gpu.command, self.chosen.target or self.chosen.command) / "kernels.so"
        if is_stale(built):
            self.compile_kernels(built)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, target)

    def compile_kernels(self, library: Path) -> None:
        """Compile the kernels.

        Raises:
            SystemExit: the compiler cannot.
        """
        library.parent.mkdir(parents=True, exist_ok=True)
        try:
            for command in for_gpu.commands(library, self.chosen):
                self.spawn(command)
        except Exception as error:
            raise SystemExit(
                f"{for_gpu.path} cannot compile the GPU kernels ({error}); see its message above. "
                f"Choose a host compiler that it supports, for nvcc with NVCC_CCBIN, {NO_KERNELS}"
            ) from None


ParallelCompile("QSGD_BUILD_JOBS", default=0, needs_recompile=is_stale).install()
setup(
    packages=[
        *find_packages(include=["qsgd_hpc", "qsgd_hpc.*"]),
        *(f"qsgd_hpc._data.{name}" for name in DATA),
    ],
    package_dir={f"qsgd_hpc._data.{name}": name for name in DATA},
    package_data={
        "qsgd_hpc": ["py.typed", "*.pyi", "scaling/predict/*.cc", "launch/cluster/*.sh"],
        **{f"qsgd_hpc._data.{name}": ["**/*"] for name in DATA},
    },
    exclude_package_data={"": ["*.pyc", "__pycache__/*"]},
    ext_modules=[core, tensorflow, *([kernels] if for_gpu else [])],
    cmdclass={"build_ext": BuildExtensions},
)
