"""Wheels, sdists and every kind of editable install carry the core and the data folders."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, environment, run

pytestmark = [pytest.mark.timeout(1800), pytest.mark.serial]
SHIPPED = [
    "jobs/polaris.yaml",
    "jobs/schema.json",
    "templates/pbs.sh.j2",
    "templates/macros.sh.j2",
    "templates/report.html.j2",
    "scaling/README.md",
]


@pytest.fixture(scope="module", autouse=True)
def shared_objects(tmp_path_factory):
    """Compile once, from the sdist's sources, for all that is built here."""
    folder = tmp_path_factory.mktemp("objects")
    (folder / "extra.cfg").write_text(f"[build_ext]\nbuild_temp = {folder}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIST_EXTRA_CONFIG", str(folder / "extra.cfg"))
        patch.setenv("QSGD_CXXFLAGS", "-O0")  # what is built here need not be fast
        patch.setenv("QSGD_GPU", "none")
        yield


def in_tree(folder: str, pattern: str) -> set[str]:
    """Return the files below a folder of this tree, as archives name them."""
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(pattern)}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Archive of the sources, as it is uploaded."""
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT, cwd=out)
    return next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """The wheel that was built from the sdist, not from this tree."""
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out]
    run(*pip, sdist, cwd=out)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def sources(sdist, tmp_path_factory) -> Path:
    """The unpacked sdist: what a packager starts from."""
    folder = tmp_path_factory.mktemp("sources")
    with tarfile.open(sdist) as archive:
        # Python 3.10.12, 3.11.4 and 3.12 brought filters, which later ones ask for.
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder, **safely)
    return next(folder.iterdir())


@pytest.mark.gate
def test_sdist_carries_sources_and_data(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {
        *SHIPPED,
        "LICENSE",
        *in_tree("csrc", "*.*"),
        *in_tree("building", "*.py"),
        *in_tree("qsgd_hpc", "*.py"),
    } <= names
    assert not [name for name in names if name.endswith((".pyc", ".so"))]


def test_wheel_carries_every_module_and_the_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"qsgd_hpc/_data/{name}" for name in SHIPPED} <= names
    assert in_tree("qsgd_hpc", "*.py") <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"qsgd_hpc"}


@pytest.mark.parametrize("kind", ["wheel", "editable", "editable-strict"])
def test_installed_package_finds_its_data(kind, request, sources, tmp_path):
    python = environment(tmp_path / "env")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    if kind == "wheel":
        run(*pip, request.getfixturevalue("wheel"), cwd=tmp_path)
    else:
        mode = kind.partition("-")[2]
        settings = ["--config-settings", f"editable_mode={mode}"] if mode else []
        run(*pip, *settings, "--editable", sources, cwd=tmp_path)
    (tmp_path / "train.py").write_text("")
    place = run(python, "-c", "import qsgd_hpc._core as c; print(c.__file__)", cwd=tmp_path)
    assert not place.startswith(str(ROOT)), "this tree's package was found instead"
    script = run(
        *[python, "-m", "qsgd_hpc", "submit", "--site", "polaris", "--account", "me"],
        *["--nodes", "8", "--dry-run", "train.py"],
        cwd=tmp_path,
    )
    assert "#PBS -l select=8:system=polaris" in script
    enter = "import os; from qsgd_hpc.launch.command import ENTER; print(os.access(ENTER, os.X_OK))"
    assert run(python, "-c", enter, cwd=tmp_path).strip() == "True"
    stray = "import importlib.util as u; print([u.find_spec(n) for n in ('jobs', 'templates')])"
    assert run(python, "-c", stray, cwd=tmp_path).strip() == "[None, None]"
