"""A job that needs this package in a Python without it: refused, or noted where it is not known."""

from __future__ import annotations

import dataclasses
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from qsgd_hpc import jobs
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites
from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.request.python_fit import noted, package_faults
from tests.jobs.fake_schedulers import Fakes

USES = "import torch\nfrom qsgd_hpc import torch as hvd\n"
BITS = {"env": {"QSGD_BITS": "4"}}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment without any package."""
    folder = tmp_path_factory.mktemp("bare") / "env"
    venv.create(folder, symlinks=True)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with scripts, and no path by which other Pythons find the package."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("QSGD_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    Path("uses.py").write_text(USES)
    Path("may_use.py").write_text("try:\n    import qsgd_hpc\nexcept ImportError:\n    pass\n")
    return tmp_path


@pytest.mark.parametrize(
    ("script", "fields", "need"),
    [
        ("train.py", {"env": {"QSGD_BITS": "4"}}, "--bits 4"),
        ("train.py", {"env": {"QSGD_WEIGHT_BITS": "8"}}, "--weight-bits 8"),
        ("train.py", {"horovod": True}, "--horovod"),
        ("uses.py", {}, "uses.py"),
        ("train.py", {}, None),
        ("train.py", {"env": {"QSGD_BITS": "32"}}, None),
        ("may_use.py", {}, None),
        ("uses.py", {"modules": ("cudatoolkit",)}, None),  # a module may change the path
    ],
)
@pytest.mark.parametrize("site", ["local", "polaris"])
def test_a_python_without_the_package_is_refused(
    script: str, fields: dict[str, Any], need: str | None, site: str, bare: Path, folder: Path
) -> None:
    python = bare / "bin" / "python"
    for choice in ({"venv": bare}, {"python": str(python)}):
        request = JobRequest(Path(script), workdir=folder, **{**fields, **choice})
        found = package_faults(request, sites.load(site))
        assert found == [
            f"{need} needs qsgd-hpc, which is not installed for {python}. Use `{python} -m pip "
            "install qsgd-hpc`, or select another Python by --venv, --conda or --python."
        ] * bool(need)


def test_a_python_that_has_the_package_or_is_not_here_is_not_refused(
    bare: Path, folder: Path
) -> None:
    local = sites.load("local")
    for choice in ({}, {"python": sys.executable}, {"python": "/nowhere/python"}, {"conda": "x"}):
        request = JobRequest(Path("uses.py"), workdir=folder, **choice)
        assert package_faults(request, local) == []
    found = {"PYTHONPATH": str(Path(jobs.__file__).parents[2])}
    request = JobRequest(Path("uses.py"), workdir=folder, venv=bare, env=found)
    assert package_faults(request, local) == []


def remarks(site: str, script: str = "uses.py", **fields: Any) -> str:
    before = sites.load(site)
    site_ = noted(JobRequest(Path(script), **fields), before)
    return "\n".join(site_.remarks[len(before.remarks) :])


def test_the_python_of_a_site_is_named_with_what_to_do(folder: Path) -> None:
    assert remarks("perlmutter") == (
        f"the job runs perlmutter's python (module load pytorch/2.8.0), not {sys.executable}: "
        "install qsgd-hpc for it, or select another Python by --venv, --conda or --python."
    )
    assert "(module use /soft/modulefiles; module load conda; conda activate base)" in remarks(
        "polaris", "train.py", **BITS
    )


def test_nothing_is_said_of_a_python_that_was_chosen_or_does_without(folder: Path) -> None:
    assert remarks("polaris", "train.py") == ""
    assert remarks("slurm") == ""  # its jobs run this Python
    assert remarks("local") == ""
    assert remarks("polaris", modules=("qsgd-hpc/0.1.0",)) == ""
    for choice in ({"venv": Path("env")}, {"conda": "mine"}, {"python": "python3"}):
        assert remarks("polaris", **choice) == ""


def test_submit_notes_the_sites_python_and_refuses_one_without_the_package(
    fakes: Fakes, folder: Path, bare: Path
) -> None:
    fakes.says("qsub", "8.polaris-login-bed\n")
    told: list[str] = []
    request = JobRequest(Path("uses.py"), site="polaris")
    jobs.submit_all(request, told.append)
    assert len([note for note in told if "the job runs polaris's python" in note]) == 1
    with pytest.raises(UsageError, match=r"^uses.py needs qsgd-hpc, which is not installed for"):
        jobs.submit(dataclasses.replace(request, venv=bare))
    assert len(fakes.calls("qsub")) == 1
    assert jobs.render(dataclasses.replace(request, venv=bare))  # maybe for another machine
