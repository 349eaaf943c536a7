"""Build qsgd_hpc._core and ship the data folders; everything else is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import find_packages, setup

ROOT = Path(__file__).parent
# What site users read, copy and edit lives at the top level and is imported as qsgd_hpc._data.*.
DATA = ("jobs", "templates", "scaling")
NEWEST_SOURCE_S = max(p.stat().st_mtime for p in ROOT.glob("csrc/**/*.*"))


def is_stale(compiled: str, source: str) -> bool:
    """Tell whether an object file is older than any source or header."""
    path = Path(compiled)
    return not path.exists() or path.stat().st_mtime < NEWEST_SOURCE_S


core = Pybind11Extension(
    "qsgd_hpc._core",
    sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.cc")),
    include_dirs=["csrc"],
    depends=sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.h")),
    cxx_std=17,
    # No fused multiply-add behind our back: the same input gives the same bytes on every machine.
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno"],
    libraries=["dl"],
)

ParallelCompile("QSGD_BUILD_JOBS", default=0, needs_recompile=is_stale).install()
setup(
    packages=[
        *find_packages(include=["qsgd_hpc", "qsgd_hpc.*"]),
        *(f"qsgd_hpc._data.{name}" for name in DATA),
    ],
    package_dir={f"qsgd_hpc._data.{name}": name for name in DATA},
    package_data={
        "qsgd_hpc": ["py.typed", "*.pyi"],
        **{f"qsgd_hpc._data.{name}": ["**/*"] for name in DATA},
    },
    exclude_package_data={"": ["*.pyc", "__pycache__/*"]},
    ext_modules=[core],
)
