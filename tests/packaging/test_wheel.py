"""One wheel for every Linux and every MPI: built without a compiler, run beside each MPI.

It is built as `make wheel` does, from PyPI alone.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from building.compiler import GLIBC, Compiler
from building.kernels import kernel_compiler
from building.wheel import pythons, version_of
from qsgd_hpc import _core
from tests.core.test_clones import check_best_form
from tests.packaging.environments import ROOT, environment, run

pytestmark = [pytest.mark.timeout(1800), pytest.mark.serial]

# By other processors' names, in folders of versions, behind wrappers: all that could compile.
COMPILERS = re.compile(r"(.*-)?(gcc|g\+\+|cc|c\+\+|clang|clang\+\+|c89|c99|nvcc|hipcc)(-[\d.]+)?")

# tests/, test_x.py, x_test.py, conftest.py; but not bench/contestants.py.
TESTS = re.compile(r"(^|[/_])(conf)?tests?[/_.]")

# An allreduce in codes, whose error is bounded, and one that must raise on every rank.
SCRIPT = """
import sys
import numpy as np
import qsgd_hpc.arrays as hvd
from qsgd_hpc import _core
from qsgd_hpc.errors import HorovodInternalError
from qsgd_hpc.runtime import basics

hvd.init()
x = np.linspace(-1, 1, 100_000, dtype=np.float32)
mean = hvd.allreduce(x, compression=hvd.Compression.qsgd(bits=8))
assert abs(mean - x).max() < 0.02, abs(mean - x).max()
try:
    hvd.allreduce(np.zeros(1 + hvd.rank()), "apart")
except HorovodInternalError as error:
    assert "shape" in str(error), error
    library = basics.context().mpi.library
    print(f"rank {hvd.rank()} of {hvd.size()}: {library}, {_core.COMPILER}, {_core.__file__}")
"""


@pytest.fixture(scope="module")
def bare_path(tmp_path_factory) -> str:
    """Folder with all programs of this machine but the compilers."""
    folder = tmp_path_factory.mktemp("programs")
    for place in reversed(os.get_exec_path()):
        for program in Path(place).glob("*"):
            if not COMPILERS.fullmatch(program.name):
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
    return str(folder)


@pytest.fixture(scope="module")
def builder() -> Path:
    """The Python that builds wheels."""
    run("make", "--silent", ".venv-wheel/.ready", cwd=ROOT)
    return ROOT / ".venv-wheel" / "bin" / "python"


def build(builder: Path, out: Path, *arguments: str, **environ: str) -> Path:
    """Return the one wheel that `python -m building.wheel` makes."""
    command = [builder, "-m", "building.wheel", "--out", out, *arguments]
    run(*command, cwd=ROOT, **{"QSGD_GPU": "none", **environ})
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(builder, bare_path, tmp_path_factory) -> Path:
    """The wheel for this Python, made where no compiler is."""
    return build(builder, tmp_path_factory.mktemp("wheel"), PATH=bare_path)


def test_it_is_for_every_glibc_since_2_17_and_small(wheel):
    assert f"manylinux_2_17_{platform.machine()}" in wheel.name
    assert wheel.stat().st_size < 3 * 2**20


def test_it_holds_the_libraries_and_no_sources_or_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    libraries = {name.split(".")[0] for name in names if name.endswith(".so")}
    assert libraries == {"qsgd_hpc/_core", "qsgd_hpc/tensorflow/_ops"}
    sources = {name for name in names if name.endswith((".cc", ".h", ".cu"))}
    # The simulator is compiled where SimGrid is, when it is first asked for.
    assert {Path(name).parent.name for name in sources} == {"predict"}
    assert not [name for name in names if TESTS.search(name)]
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_same_commit_gives_the_same_bytes(wheel, builder, tmp_path):
    again = build(builder, tmp_path)
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A Python that has the wheel, and this environment's packages behind it."""
    python = environment(tmp_path_factory.mktemp("env") / "env")
    install(python, wheel)
    return python


def install(python: Path, *packages: str | Path) -> None:
    """Install these, and nothing that they need."""
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    run(*pip, "--ignore-installed", *packages, cwd=ROOT)


def test_it_has_every_instruction_set_and_codes_as_this_machines_compiler(installed, tmp_path):
    # One program for both cores: digests of codes in every scheme, by every instruction set.
    program = """
import hashlib, json
import numpy as np
from qsgd_hpc import _core
x = np.random.default_rng(7).standard_normal(100_003).astype(np.float32)
found = {}
for name in _core.instruction_sets():
    _core.use_instruction_set(name)
    codes = [_core.encode(x, spec=_core.CodecSpec(bits=bits), seed=3) for bits in range(2, 9)]
    found[name] = hashlib.sha256(b"".join(bytes(code) for code in codes)).hexdigest()
print(json.dumps([_core.__file__, _core.COMPILER, found]))
"""
    place, compiler, found = json.loads(run(installed, "-c", program, cwd=tmp_path))
    assert not place.startswith(str(ROOT))
    assert compiler.startswith("Clang")
    assert list(found) == _core.instruction_sets()
    own = json.loads(run(sys.executable, "-c", program, cwd=tmp_path))[2]
    assert found == own


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_its_operations_run_in_tensorflow(installed, tmp_path):
    """Which was compiled with another C++ library."""
    program = """
import tensorflow as tf
import qsgd_hpc.tensorflow as hvd
from qsgd_hpc import _core

hvd.init()
step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="x"))
for n in range(200):
    assert step(tf.fill([n], 2.0)).numpy().tolist() == [2.0] * n
    assert hvd.allgather(tf.fill([n, 2], 3.0)).shape == (n, 2)
print(_core.COMPILER)
"""
    install(installed, "mpich")
    said = run(installed, "-c", program, cwd=tmp_path, TF_CPP_MIN_LOG_LEVEL="3")
    assert said.startswith("Clang")


@pytest.fixture(scope="module")
def ziglang(tmp_path_factory) -> Compiler:
    """The compiler of wheels."""
    python = environment(tmp_path_factory.mktemp("ziglang") / "env")
    install(python, f"--constraint={ROOT / 'building' / 'constraints.txt'}", "ziglang")
    target = f"{platform.machine()}-linux-gnu.{GLIBC}"
    return Compiler((str(python), "-m", "ziglang", "c++", "-target", target), target=target)


def test_its_compiler_makes_the_form_that_fits_the_cpu(ziglang, tmp_path):
    check_best_form(list(ziglang.command), tmp_path)


@pytest.mark.skipif(kernel_compiler() is None, reason="no nvcc here")
def test_its_gpu_kernels_load_beside_the_core(ziglang, tmp_path):
    library = tmp_path / "kernels.so"
    for command in kernel_compiler().commands(library, ziglang):
        run(*command, cwd=ROOT)
    assert _core.gpu_platform(str(library)).startswith("CUDA")
    # Two libraries of C++, nvcc's and ziglang's, in one library would not fit each other.
    assert "libstdc++" not in run("ldd", library, cwd=tmp_path)


def debian(folder: Path, *packages: str) -> Path:
    """Unpack packages of Debian or Ubuntu, and what they need that is not here; return the root."""
    if not shutil.which("apt-get"):
        pytest.skip("no apt-get here, so no MPI of Debian's")
    simulate = ["apt-get", "-s", "--no-install-recommends", "install", *packages]
    listed = re.findall(r"^Inst (\S+)", run(*simulate, cwd=folder), re.M)
    if listed:
        run("apt-get", "download", *listed, cwd=folder)
    for package in folder.glob("*.deb"):
        run("dpkg", "-x", package, folder, cwd=folder)
    return folder / "usr"


def debian_environ(kind: str, folder: Path) -> dict[str, str]:
    """Return the variables that a site's module would set for an MPI of Debian's."""
    usr = debian(folder, "mpich" if kind == "mpich" else "openmpi-bin")
    programs = folder / "bin"
    programs.mkdir()
    for name in ("mpiexec", "mpirun"):
        (programs / name).symlink_to(usr / "bin" / f"{name}.{kind}")
    (libraries,) = usr.glob("lib/*-linux-gnu")
    if kind == "mpich":  # mpi4py looks for the name that MPICH itself gives it
        (libraries / "libmpi.so.12").symlink_to("libmpich.so.12")
    return {
        "PATH": os.pathsep.join([str(programs), str(usr / "bin"), os.environ["PATH"]]),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, [libraries, *folder.glob("lib/*-linux-gnu")])),
        **({"OPAL_PREFIX": str(usr)} if kind == "openmpi" else {}),
    }


# Each MPI that can be had: by pip into the environment, or of the system, as from a site's module.
MPIS = {
    "mpich": "MPICH",
    "openmpi": "Open MPI",
    "impi-rt": "Intel(R) MPI",
    "debian-mpich": "MPICH",
    "debian-openmpi": "Open MPI",
}


@pytest.mark.parametrize("mpi", MPIS)
def test_it_runs_beside_each_mpi(mpi, wheel, tmp_path):
    python = environment(tmp_path / "env")
    kind, _, package = mpi.rpartition("-") if mpi.startswith("debian") else ("", "", mpi)
    install(python, wheel, *([] if kind else [package]))
    environ = debian_environ(package, tmp_path) if kind else {}
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [python, "-m", "qsgd_hpc", "run", "-np", "2", "train.py"]
    lines = sorted(run(*command, cwd=tmp_path, **environ).splitlines())
    assert [line.partition(":")[0] for line in lines] == ["rank 0 of 2", "rank 1 of 2"]
    assert all(MPIS[mpi] in line and "Clang" in line for line in lines), lines
    assert not any(str(ROOT) in line for line in lines), lines


@pytest.fixture(scope="module")
def wheels(builder, tmp_path_factory) -> dict[Path, Path]:
    """The wheel of each Python on this machine, by interpreter."""
    out = tmp_path_factory.mktemp("wheels")
    run(builder, "-m", "building.wheel", "--out", out, "--every-python", cwd=ROOT)
    found = {}
    for python in pythons():
        tag = "cp{}{}-".format(*version_of(python))
        (found[python],) = (wheel for wheel in out.glob("*.whl") if f"-{tag}" in wheel.name)
    return found


@pytest.mark.timeout(3600)
def test_there_is_one_for_every_python_which_runs_on_two_ranks(wheels, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    for python, wheel in wheels.items():
        folder = tmp_path / wheel.stem
        run(python, "-m", "venv", folder, cwd=tmp_path)
        own = folder / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", own, "install", "--quiet"]
        run(*pip, f"{wheel}[mpich]", cwd=tmp_path)
        lines = run(own, "-m", "qsgd_hpc", "run", "-np", "2", "train.py", cwd=tmp_path).splitlines()
        assert sorted(line.partition(":")[0] for line in lines) == ["rank 0 of 2", "rank 1 of 2"]
        assert all(f"{folder}/" in line for line in lines), lines


def test_sources_install_without_a_compiler(bare_path, tmp_path):
    python = environment(tmp_path / "env")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--verbose"]
    environ = {"PATH": bare_path, "QSGD_CXXFLAGS": "-O0", "QSGD_GPU": "none"}
    # pip prints what a build prints to stderr.
    said = run("sh", "-c", 'exec "$@" 2>&1', "sh", *pip, ROOT, cwd=tmp_path, **environ)
    assert len(re.findall("PyPI's ziglang compiles", said)) == 1
    program = "import qsgd_hpc._core as core; print(core.__file__, core.COMPILER)"
    place, _, compiler = run(python, "-c", program, cwd=tmp_path).partition(" ")
    assert not place.startswith(str(ROOT))
    assert compiler.startswith("Clang")


@pytest.fixture(scope="module")
def arm(tmp_path_factory) -> list[str]:
    """What runs this Python's version on an emulated ARM: Debian's, from its packages."""
    if not (shutil.which("qemu-aarch64-static") and shutil.which("apt-get")):
        pytest.skip("no emulator of an ARM; `make arm` installs it")
    folder = tmp_path_factory.mktemp("arm")
    for place in ("state/lists/partial", "cache/archives/partial"):
        (folder / place).mkdir(parents=True)
    options = ["APT::Architecture=arm64", "APT::Architectures=arm64", "APT::Sandbox::User=root",
               f"Dir::State={folder}/state", "Dir::State::status=/dev/null",
               f"Dir::Cache={folder}/cache"]  # fmt: skip
    apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    run(*apt, "update", cwd=folder)
    python = f"python3.{sys.version_info.minor}"
    install = [*apt, "-s", "--no-install-recommends", "install", python, "libstdc++6"]
    try:
        listed = re.findall(r"^Inst (\S+)", run(*install, cwd=folder), re.M)
    except AssertionError:
        pytest.skip(f"this Debian has no {python} for an ARM")
    run(*apt, "download", *listed, cwd=folder)
    for package in folder.glob("*.deb"):
        run("dpkg", "-x", package, folder / "root", cwd=folder)
    return ["qemu-aarch64-static", "-L", f"{folder}/root", f"{folder}/root/usr/bin/{python}"]


def test_one_for_an_arm_is_built_here_and_runs_on_two_ranks(builder, arm, tmp_path):
    few = {"QSGD_GPU": "auto", "QSGD_GPU_TARGETS": "compute_80"}
    wheel = build(builder, tmp_path, "--target", f"aarch64-linux-gnu.{GLIBC}", **few)
    assert "manylinux_2_17_aarch64" in wheel.name
    site = tmp_path / "site"
    platforms = [f"--platform=manylinux_2_{n}_aarch64" for n in (17, 27, 28)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", *platforms,
           "--dest", tmp_path, "--no-deps"]  # fmt: skip
    run(*pip, "numpy", "mpi4py", "mpich", "cloudpickle", cwd=tmp_path)
    # Not by pip install --target, which drops the libraries of MPI: they are data in lib.
    for each in tmp_path.glob("*.whl"):
        zipfile.ZipFile(each).extractall(site)
    (library,) = site.rglob("libmpi.so.12")
    (tmp_path / "train.py").write_text(SCRIPT)
    # The emulator has no process_vm_readv.
    environ = {"PYTHONPATH": str(site), "MPI4PY_LIBMPI": str(library),
               "MPIR_CVAR_CH4_CMA_ENABLE": "0"}  # fmt: skip
    program = "from qsgd_hpc import _core; print(_core.instruction_sets())"
    assert run(*arm, "-c", program, cwd=tmp_path, **environ).strip() == "['neon', 'scalar']"
    if kernel_compiler() and shutil.which("aarch64-linux-gnu-g++"):
        (kernels,) = site.glob("qsgd_hpc/_gpu.*.so")
        program = f"from qsgd_hpc import _core; print(_core.gpu_platform({str(kernels)!r}))"
        assert re.match(r"CUDA [\d.]+: PTX", run(*arm, "-c", program, cwd=tmp_path, **environ))
    mpiexec = Path(sys.executable).with_name("mpiexec")  # ours: it runs on this processor
    lines = run(mpiexec, "-n", "2", *arm, "train.py", cwd=tmp_path, **environ).splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == ["rank 0 of 2", "rank 1 of 2"]
