"""Build wheels that every Linux of their processor can install, with any MPI.

    python -m building.wheel                            for the Python that runs this
    python -m building.wheel --every-python             for every CPython >= 3.10 on this machine
    python -m building.wheel --every-target             for every processor of a release
    python -m building.wheel --target aarch64-linux-gnu.2.17

Each is compiled from the sdist by ziglang and named by auditwheel for the oldest glibc that it runs
with. The same commit gives the same bytes. The tools' versions are in constraints.txt.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path

from building.compiler import GLIBC, ROOT, architecture
from building.kernels import cross_compiler, kernel_compiler

__all__ = ["build_sdist", "build_wheel", "main", "pythons"]

TOOLS = Path(__file__).with_name("constraints.txt")
OLDEST = (3, 10)  # requires-python of the package
MIB = 2**20
# Largest size of a wheel without GPU kernels.
LARGEST_BYTES = 3 * MIB
TARGETS = [f"{processor}-linux-gnu.{GLIBC}" for processor in ("x86_64", "aarch64")]


def run(*command: str | Path, **environ: str) -> str:
    """Run a command with these variables and return what it printed.

    Raises:
        SystemExit: it failed; the message has the end of its output.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "PATH": path, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        output = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise SystemExit(f"{output}\n{' '.join(map(str, command))}: exit code {done.returncode}")
    return done.stdout


def commit_time() -> str:
    """Return the time of files in archives: SOURCE_DATE_EPOCH if set, else the commit's."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return given or run("git", "log", "-1", "--format=%ct").strip()


def build_environ() -> dict[str, str]:
    """Return the variables with which the same sources give the same bytes."""
    return {
        "SOURCE_DATE_EPOCH": commit_time(),
        "PIP_CONSTRAINT": str(TOOLS),
        "PIP_BUILD_CONSTRAINT": str(TOOLS),  # its name since pip 25.3
        # ziglang compiles its C++ library anew, in 90 s, for each folder that it finds it in, and
        # pip unpacks it into another folder for each wheel.
        "ZIG_LIB_DIR": str(resources.files("ziglang") / "lib"),
    }


def build_sdist(out: Path) -> Path:
    """Build the archive of this tree's sources and return its path."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, ROOT, **build_environ())
        return rewrite(next(Path(folder).glob("*.tar.gz")), out, int(commit_time()))


def rewrite(archive: Path, folder: Path, time_s: int) -> Path:
    """Rewrite a tar archive with one time, owner and mode for all files: reproducible bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / archive.name
    with (
        tarfile.open(archive) as old,
        target.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=time_s) as stream,
        tarfile.open(fileobj=stream, mode="w") as new,
    ):
        for member in sorted(old, key=lambda member: member.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, time_s
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(plain, old.extractfile(member) if member.isfile() else None)
    return target


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack the sources into a folder; return theirs."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


def cross_kernels(target: str, folder: Path) -> dict[str, str]:
    """Return the variables that add GPU kernels to a wheel for another processor.

    The kernels contain CUDA's runtime, which PyPI has for every processor.

    Args:
        target: target of ziglang.
        folder: empty folder for the runtime.
    """
    cross, nvcc = cross_compiler(target), kernel_compiler()
    if not cross or nvcc is None or nvcc.hip:
        return {}
    processor, missing = architecture(target), "" if shutil.which(cross) else cross
    if nvcc.release.startswith(("11.", "12.")):
        missing = "CUDA 13"  # PyPI's earlier packages lack the static library
    if missing:
        print(f"== without GPU kernels for {processor}: they need {missing}", flush=True)
        return {}
    platforms = [f"--platform=manylinux_2_{n}_{processor}" for n in (17, 27, 28)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    run(*pip, "--only-binary=:all:", *platforms, f"nvidia-cuda-runtime=={nvcc.release}.*")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    (library,) = folder.rglob("libcudart_static.a")
    return {"QSGD_CUDA_RUNTIME": str(library.parent)}


def build_wheel(
    sources: Path, python: Path, target: str, out: Path, kernels: Mapping[str, str]
) -> Path:
    """Build the wheel for one Python and return its path.

    Args:
        sources: folder of the unpacked sdist. Built repeatedly from one folder, all files but the
            bindings are compiled once per target: ziglang caches objects by the inode of sources,
            and the build keeps the kernels.
        python: an interpreter; it needs its headers, and nothing installed.
        target: target of ziglang, such as ``x86_64-linux-gnu.2.17``.
        out: folder of the wheel.
        kernels: from `cross_kernels`.

    Raises:
        SystemExit: a step failed, or the wheel needs newer libraries than the target has.
    """
    for made in ("lib", "temp", "bdist"):
        for folder in (sources / "build").glob(f"{made}*"):
            shutil.rmtree(folder)
    with tempfile.TemporaryDirectory() as name:
        raw, named = Path(name, "raw"), Path(name, "named")
        environ = {**build_environ(), **kernels, "QSGD_TARGET": target}
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python]
        run(*pip, "wheel", "--no-deps", "--wheel-dir", raw, sources, **environ)
        # --plat accepts only platforms of this machine's processor.
        auditwheel = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto"]
        run(*auditwheel, "--wheel-dir", named, *raw.glob("*.whl"), **environ)
        (wheel,) = named.glob("*.whl")
        tag = f"manylinux_{target.rpartition('gnu.')[2].replace('.', '_')}_{architecture(target)}"
        if tag not in wheel.name:
            raise SystemExit(f"{wheel.name} is not for {tag}, as {target} should be")
        return move(wheel, out)


def move(file: Path, folder: Path) -> Path:
    """Move a file into a folder, replacing a file of the same name."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(file, folder / file.name))


def check(wheel: Path) -> None:
    """Check the contents and the size of a wheel.

    Raises:
        SystemExit: the first fault.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    allowed = re.compile(r"qsgd_hpc(-[^/]+\.dist-info)?/(?!.*(tests?/|\.pyc$))")
    if stray := [name for name in names if not allowed.match(name)]:
        raise SystemExit(f"{wheel.name} contains {stray[0]}, which is not part of the package")
    if not [name for name in names if name.endswith("/LICENSE")]:
        raise SystemExit(f"{wheel.name} lacks the licence")
    size_bytes = wheel.stat().st_size
    kernels = any(name.startswith("qsgd_hpc/_gpu.") for name in names)
    if size_bytes > LARGEST_BYTES and not kernels:
        raise SystemExit(f"{wheel.name} has {size_bytes / MIB:.1f} MiB; expected at most 3")


def pythons() -> Iterator[Path]:
    """Yield one interpreter of each CPython >= 3.10 on PATH, in pyenv and in uv."""
    homes = [Path(folder) for folder in os.get_exec_path()]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local/share/uv/python"))
    homes += [*sorted(pyenv.glob("*/bin")), *sorted(uv.glob("cpython-*/bin"))]
    seen: set[tuple[int, ...]] = set()
    for python in [Path(sys.executable), *(p for home in homes for p in home.glob("python3.*"))]:
        version = version_of(python)
        if version >= OLDEST and version not in seen:
            seen.add(version)
            yield python


def version_of(python: Path) -> tuple[int, ...]:
    """Return an interpreter's version, such as (3, 12); () if wheels cannot be built for it.

    That excludes free-threaded builds, because the core relies on the GIL.
    """
    if not re.fullmatch(r"python3?(\.\d+)?", python.name):
        return ()
    ask = (
        "import os, sys, sysconfig as s; "
        "fit = sys.implementation.name == 'cpython' and not s.get_config_var('Py_GIL_DISABLED') "
        "and os.path.exists(s.get_path('include') + '/Python.h'); "
        "print(*sys.version_info[:2] if fit else ())"
    )
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else ()


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    """Build the requested wheels; return their paths."""
    parser = argparse.ArgumentParser(
        prog="python -m building.wheel",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--every-python", action="store_true")
    parser.add_argument("--target", action="append", help="may be given several times")
    parser.add_argument("--every-target", action="store_const", const=TARGETS, dest="target")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    asked = parser.parse_args(arguments)
    targets = asked.target or [f"{platform.machine()}-linux-gnu.{GLIBC}"]
    interpreters = pythons() if asked.every_python else [Path(sys.executable)]
    os.umask(0o022)  # archives keep modes
    made = []
    with tempfile.TemporaryDirectory() as folder:
        sources = unpack(build_sdist(Path(folder)), Path(folder))
        kernels = {each: cross_kernels(each, Path(folder, each)) for each in targets}
        for python, target in itertools.product(interpreters, targets):
            print(f"== compiling for {target} and {python}: some minutes", flush=True)
            begun_s = time.monotonic()
            wheel = build_wheel(sources, python, target, asked.out.resolve(), kernels[target])
            check(wheel)
            took_s, size_mib = time.monotonic() - begun_s, wheel.stat().st_size / MIB
            print(f"{wheel}: {size_mib:.2f} MiB in {took_s:.0f} s", flush=True)
            made.append(wheel)
    return made


if __name__ == "__main__":
    main()
