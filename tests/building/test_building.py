"""The choice of a compiler, and what a wheel may hold."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import zipfile
from importlib import resources
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from building import release, wheel
from building.compiler import GLIBC, ROOT, choose
from building.kernels import kernel_compiler
from building.needs import needs
from building.units import units

# What GCC 7 says of the vector AES instructions.
REFUSAL = 'error: attribute(target("vaes")) is unknown'


@pytest.mark.skipif(not shutil.which("g++"), reason="its headers; ziglang has built the core")
def test_clang_accepts_what_gcc_has_compiled(tmp_path):
    """Wheels, and installations without GCC, are compiled by the Clang of ziglang."""
    clang = resources.files("ziglang")
    sources = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*.cc"))]
    compiled = [each for each in units(sources, tmp_path) if not re.search("neon|bindings", each)]
    assert len(compiled) > 15
    command = [str(clang / "zig"), "clang", "-fsyntax-only", "-std=c++17", "-Icsrc"]
    command += ["-isystem", str(clang / "lib" / "include")]
    for each in compiled:
        path = tmp_path / each if (tmp_path / each).exists() else ROOT / each
        done = subprocess.run([*command, path], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def old_compiler(tmp_path: Path) -> str:
    """A compiler that is there, and knows too little."""
    path = tmp_path / "g++-7"
    path.write_text(f"#!/bin/sh\necho 'kernels.cc:20: {REFUSAL}' >&2\nexit 1\n")
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_fails_a_trial_gives_way_to_ziglang(old_compiler):
    chosen = choose({"CXX": old_compiler})
    assert chosen.target.endswith(f"-linux-gnu.{GLIBC}")
    assert chosen.requirements[0].startswith("ziglang")
    assert old_compiler in str(chosen)
    assert REFUSAL in str(chosen)


def test_a_compiler_that_is_not_there_gives_way_to_ziglang():
    chosen = choose({"CXX": "no-such-compiler -m64"})
    assert chosen.requirements
    assert "no-such-compiler -m64: No such file or directory" in str(chosen)


def test_what_is_installed_beside_the_build_is_what_the_package_requires():
    found = needs(["mpich", "jax"])
    wanted = [Requirement(each) for each in metadata("qsgd-hpc").get_all("Requires-Dist")]
    asked = [each for each in wanted if not each.marker or each.marker.evaluate({"extra": "jax"})]
    names = {each.name for each in asked} | {"mpich"}
    assert {Requirement(each).name for each in found} == names
    with pytest.raises(SystemExit, match="no extra mpic; it has mpich, torch"):
        needs(["mpic"])


def test_ziglang_can_be_refused(old_compiler):
    with pytest.raises(SystemExit, match="QSGD_TARGET=native: no C"):
        choose({"CXX": old_compiler, "QSGD_TARGET": "native"})


def test_a_target_is_for_ziglang_whatever_else_is_there(old_compiler):
    chosen = choose({"QSGD_TARGET": "aarch64-linux-gnu.2.17"})
    assert chosen.command[-2:] == ("-target", "aarch64-linux-gnu.2.17")


@pytest.fixture
def hipcc(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a hipcc that refuses these GPUs, and compiles for AMD where told so."""
    script = f"""#!/bin/sh
[ "$HIP_PLATFORM" = amd ] || exit 1
case "$*" in
    *--version) echo "HIP version: 5.2.21153-0" ;;
    {request.param}) echo "a note" >&2; echo "error: invalid target ID" >&2; exit 1 ;;
esac
"""
    path = tmp_path / "hipcc"
    path.write_text(script)
    path.chmod(0o755)
    return {"QSGD_GPU": "hip", "PATH": str(tmp_path)}


@pytest.mark.parametrize("hipcc", ["*gfx942*"], indirect=True)
def test_kernels_are_compiled_for_the_gpus_that_hipcc_knows(hipcc):
    compiler = kernel_compiler(hipcc)
    assert compiler is not None
    assert [word for word in compiler.command if "gfx" in word] == [
        '-DQSGD_GPU_BUILT="HIP 5.2: gfx90a"',
        "--offload-arch=gfx90a",
    ]


@pytest.mark.parametrize("hipcc", ["*gfx*"], indirect=True)
def test_a_hipcc_that_knows_none_of_the_gpus_is_refused_with_its_reason(hipcc):
    with pytest.raises(
        SystemExit, match=r"compile for gfx90a, gfx942 \(error: invalid target ID\)"
    ):
        kernel_compiler(hipcc)


@pytest.fixture
def nvcc(tmp_path: Path) -> dict[str, str]:
    """The environment of an nvcc that knows three GPUs."""
    path = tmp_path / "nvcc"
    path.write_text("""#!/bin/sh
case $1 in
    --version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
    *) printf 'compute_75\ncompute_80\ncompute_90\n' ;;
esac
""")
    path.chmod(0o755)
    return {"QSGD_GPU": "cuda", "PATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("wanted", "built", "codes"),
    [
        ("", "sm_75, sm_80, sm_90 and PTX", ["sm_75", "sm_80", "sm_90", "compute_90"]),
        ("compute_80", "PTX", ["compute_80"]),
        ("sm_90", "sm_90", ["sm_90"]),
    ],
)
def test_kernels_are_compiled_for_the_gpus_that_are_wanted(nvcc, wanted, built, codes):
    compiler = kernel_compiler({**nvcc, "QSGD_GPU_TARGETS": wanted})
    assert compiler is not None
    options = [word for word in compiler.command if "gencode" in word]
    assert [option.partition("code=")[2].partition("code=")[2] for option in options] == codes
    assert f'-DQSGD_GPU_BUILT="CUDA 13.0: {built}"' in compiler.command


def test_a_gpu_that_nvcc_does_not_know_is_refused_with_those_it_does(nvcc):
    with pytest.raises(SystemExit, match=r"QSGD_GPU_TARGETS=sm_70: .*/nvcc supports .*sm_75"):
        kernel_compiler({**nvcc, "QSGD_GPU_TARGETS": "sm_70,sm_80"})


@pytest.mark.parametrize("hipcc", ["*gfx942*"], indirect=True)
def test_a_gpu_that_hipcc_does_not_know_is_refused_where_it_is_wanted(hipcc):
    with pytest.raises(SystemExit, match=r"does not compile for gfx942 \(error"):
        kernel_compiler({**hipcc, "QSGD_GPU_TARGETS": "gfx90a,gfx942"})


@pytest.mark.parametrize(
    ("names", "refusal"),
    [
        (["qsgd_hpc/__init__.py", "qsgd_hpc-1.dist-info/licenses/LICENSE"], ""),
        (["qsgd_hpc/__init__.py", "qsgd_hpc-1.dist-info/METADATA"], "lacks the licence"),
        (["tests/test_wheel.py"], "contains tests/test_wheel.py"),
        (["qsgd_hpc/tests/test_wheel.py"], "contains qsgd_hpc/tests/test_wheel.py"),
        (["qsgd_hpc/__init__.pyc"], "contains qsgd_hpc/__init__.pyc"),
        (["csrc/engine/engine.cc"], "contains csrc/engine/engine.cc"),
    ],
)
def test_a_wheel_holds_the_package_and_its_licence_alone(names, refusal, tmp_path):
    made = tmp_path / "qsgd_hpc-1-cp311-cp311-manylinux_2_17_x86_64.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    if not refusal:
        return wheel.check(made)
    with pytest.raises(SystemExit, match=refusal):
        wheel.check(made)


def test_sources_are_packed_to_the_same_bytes_at_any_time(tmp_path):
    packed = []
    for place, mode in (("one", 0o700), ("two", 0o755)):
        folder = tmp_path / place
        folder.mkdir()
        (folder / "b.sh").write_text("exit\n")
        (folder / "b.sh").chmod(mode)
        with tarfile.open(folder / "a.tar.gz", "w:gz") as archive:
            archive.add(folder / "b.sh", "a/b.sh")
        written = wheel.rewrite(folder / "a.tar.gz", folder / "out", 1_700_000_000)
        packed.append(written.read_bytes())
        with tarfile.open(written) as archive:
            assert archive.extractfile("a/b.sh").read() == b"exit\n"
            assert archive.getmember("a/b.sh").mode == 0o755
    assert packed[0] == packed[1]


def test_recipes_are_of_this_version_and_know_what_it_needs():
    wanted = [Requirement(text) for text in metadata("qsgd-hpc").get_all("Requires-Dist")]
    names = [each.name for each in wanted if each.marker is None]
    assert len(names) > 10
    for path in ("spack/package.py", "conda-forge/recipe.yaml"):
        text = (ROOT / "recipes" / path).read_text()
        assert [name for name in names if name not in text.lower()] == [], path
    for path in [path for path in (ROOT / "recipes").rglob("*") if path.is_file()]:
        text = path.name + path.read_text()
        assert release.version() in text, path


def tree(folder: Path, title: str) -> Path:
    """Return a folder with the files that name the version, the changelog under this title."""
    for name in ("pyproject.toml", "CITATION.cff"):
        shutil.copy(ROOT / name, folder)
    text = f"# Changelog\n\n## {title}\n\n- one\n\n## [0.0.1]\n"
    (folder / "CHANGELOG.md").write_text(text)
    return folder


def test_a_release_needs_a_dated_section_of_its_version(tmp_path):
    number = release.version()
    assert release.faults(tree(tmp_path, title=f"[{number}] - 2026-12-01")) == []
    assert release.notes(tmp_path)[1] == "- one\n"
    for title in (f"[{number}] - unreleased", "[9.9.9] - 2026-12-01"):
        (fault,) = release.faults(tree(tmp_path, title=title))
        assert title in fault


def test_a_release_has_one_version(tmp_path):
    tree(tmp_path, title=f"[{release.version()}] - 2026-12-01")
    cited = tmp_path / "CITATION.cff"
    cited.write_text(cited.read_text().replace(release.version(), "9.9.9"))
    (fault,) = release.faults(tmp_path)
    assert "9.9.9" in fault and release.version() in fault
    assert not [f for f in release.faults(ROOT) if "CITATION" in f]


def test_every_source_is_compiled_once_and_again_only_after_a_change(tmp_path):
    sources = [*(f"csrc/engine/{n:02}.cc" for n in range(13)), "csrc/bindings/module.cc"]
    kernels = "csrc/quant/kernels_avx2.cc"
    written = units([*sources, kernels], tmp_path)
    assert kernels in written
    paths = [tmp_path / unit for unit in written if unit != kernels]
    included = re.findall(r'#include "(.*)"', "".join(path.read_text() for path in paths))
    assert sorted(f"csrc/{name}" for name in included) == sorted(sources)
    before = {path: path.stat().st_mtime_ns for path in paths}
    assert units([*sources[:-1], kernels], tmp_path)
    assert {path: path.stat().st_mtime_ns for path in paths} == before
    units(sources[1:], tmp_path)
    changed = [path.name for path in paths if path.stat().st_mtime_ns != before[path]]
    assert changed == ["engine_1.cc"]
