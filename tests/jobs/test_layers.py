"""Profiles in layers: extended, overridden by user and project, brought by other packages."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites
from qsgd_hpc.jobs.sites import files
from qsgd_hpc.jobs.sites.files import merged

JOBS = Path(__file__).parents[2] / "jobs"
Write = Callable[[str, str], Path]
TINY = "description: tiny\nscheduler: local\nlauncher: {argv: [env]}\n"


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No user, no project and no packages but those of the test."""
    monkeypatch.setenv("QSGD_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("QSGD_SITE", raising=False)
    (tmp_path / "project" / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project" / "deep" / "er")
    files._packages.cache_clear()
    yield
    files._packages.cache_clear()


@pytest.fixture
def user(tmp_path: Path) -> Write:
    return _writer(tmp_path / "home" / "sites")


@pytest.fixture
def project(tmp_path: Path) -> Write:
    return _writer(tmp_path / "project" / ".qsgd-hpc" / "sites")


def _writer(folder: Path) -> Write:
    def write(name: str, text: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(text)
        return folder / f"{name}.yaml"

    return write


def test_project_beats_user_beats_shipped(user: Write, project: Write) -> None:
    user("polaris", "defaults: {account: users, queue: capacity}\n")
    project("polaris", "defaults: {account: projects}\n")
    site = sites.load("polaris")
    assert site.default_account == "projects"
    assert site.default_queue == "capacity"
    assert site.default_filesystems == ("home", "eagle")


def test_project_is_found_from_any_folder_below_it_and_from_no_other(
    project: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project("mine", TINY)
    assert "mine" in sites.names()
    monkeypatch.chdir(tmp_path)
    assert "mine" not in sites.names()


def test_home_folder_is_one_layer_and_not_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QSGD_HOME", str(tmp_path / "project" / ".qsgd-hpc"))
    _writer(tmp_path / "project" / ".qsgd-hpc" / "sites")("mine", TINY)
    assert [source.layer for source in files.sources("mine")] == ["user"]


def test_extending_profile_inherits_facts_but_is_another_machine(user: Write) -> None:
    user("mine", "extends: polaris\nnodes: 4\nqueues: {debug: {nodes: [1, 4]}}\n")
    site, base = sites.load("mine"), sites.load("polaris")
    assert site.gpu == base.gpu
    assert site.queues["debug"].nodes == (1, 4)
    assert site.queues["prod"] == base.queues["prod"]
    assert site.login_hosts == ()
    assert site.name == "mine"


def test_null_takes_away_what_the_profile_below_says(user: Write, project: Write) -> None:
    user(
        "mine",
        "extends: polaris\nlauncher: {mpi: null}\nproxy: ~\n"
        "queues: {preemptable: , debug: {note: a}}\n"
        "env: {MINE: null}\nlimits: {queued_per_project: null}\n",
    )
    project("mine", "queues: {debug: {note: null}}\ngpu: null\nnetwork: {within: null}\n")
    mine, base = sites.load("mine"), sites.load("polaris")
    assert (base.launcher_mpi, mine.launcher_mpi) == ("Cray MPICH", "")
    assert mine.launcher_argv == base.launcher_argv
    assert (mine.proxy, mine.gpu) == (None, None)
    assert base.proxy and base.gpu
    assert set(base.queues) - set(mine.queues) == {"preemptable"}
    assert mine.queues["debug"].note == ""
    project("mine", "extends: null\n")
    with pytest.raises(UsageError, match="key 'description' is missing"):
        sites.load("mine")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("extends: polaris\nlauncher: {mpj: null}\n", "unknown key 'mpj' in 'launcher'"),
        ("extends: polaris\nlauncher: null\n", "key 'launcher' is missing"),
        ("extends: polaris\nsetup: [null]\n", "it is null"),
        (TINY + "python: null\n", "'python' must be the Python that runs scripts"),
    ],
)
def test_null_is_for_known_keys_of_a_profile_below(user: Write, text: str, fault: str) -> None:
    user("mine", text)
    with pytest.raises(UsageError, match=fault):
        sites.load("mine")


def test_profile_that_extends_a_generic_one_is_not_generic(user: Write) -> None:
    user("mine", "extends: slurm\n")
    assert not sites.load("mine").generic
    assert sites.choose(None, sites.Host(("x",), {}, ("slurm",))).name == "slurm"


def test_override_may_add_what_is_extended(user: Write, project: Write) -> None:
    user("mine", "extends: polaris\n")
    project("mine", "extends: perlmutter\n")
    assert sites.load("mine").scheduler == "slurm"


@pytest.mark.parametrize("links", [("a",), ("a", "b"), ("a", "b", "c")])
def test_circle_of_extends_is_shown_as_one(user: Write, links: tuple[str, ...]) -> None:
    for name, base in zip(links, (*links[1:], links[0]), strict=True):
        user(name, f"# first\nextends: {base}\n")
    with pytest.raises(
        UsageError, match="line 2: the profiles extend each other cyclically"
    ) as caught:
        sites.load("a")
    assert f"cyclically: {' -> '.join((*links, 'a'))} (in " in str(caught.value)


def test_unknown_base_names_line_and_nearest(user: Write) -> None:
    where = user("mine", "nodes: 1\nextends: polarsi\n")
    with pytest.raises(UsageError) as caught:
        sites.load("mine")
    assert str(caught.value) == (
        "site 'mine', line 2: it extends the unknown site 'polarsi'. Did you mean 'polaris'? "
        f"(in {where})"
    )


def test_fault_of_a_merged_profile_names_the_file_that_holds_it(
    user: Write, project: Write
) -> None:
    where = user("mine", TINY + "queues: {x: {nodes: [1, 2]}}\n")
    project("mine", "queues: {x: {note: n}}\n")
    with pytest.raises(UsageError) as caught:
        sites.load("mine")
    assert "line 4: key 'walltime' is missing in 'queues.x'" in str(caught.value)
    assert str(where) in str(caught.value)


def test_fault_between_two_files_names_both(user: Write) -> None:
    where = user("polaris", "node: {gpus: 8}\n")
    with pytest.raises(UsageError) as caught:
        sites.load("polaris")
    assert "must name each of the node's 8 GPUs once" in str(caught.value)
    assert "jobs/polaris.yaml, together with" in str(caught.value)
    assert str(where) in str(caught.value)


def test_project_folder_where_anyone_can_write_is_passed_over(
    project: Write, tmp_path: Path
) -> None:
    project("mine", TINY)
    (tmp_path / "project").chmod(0o777)
    assert "mine" not in sites.names()


def test_own_folder_in_its_usual_place_is_no_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "project"))
    _writer(tmp_path / "project" / ".qsgd-hpc" / "sites")("mine", TINY)
    assert "mine" not in sites.names()


README_YAML = re.findall(
    r"^```yaml\n# ~/.qsgd-hpc/sites/(\w+)\.yaml\n(.*?)^```",
    (JOBS / "README.md").read_text(),
    re.M | re.S,
)


@pytest.mark.parametrize(("name", "text"), README_YAML)
def test_profiles_of_the_readme_are_sound(name: str, text: str, user: Write) -> None:
    user(name, text)
    assert sites.load(name).name == name


def test_readme_names_every_shipped_profile() -> None:
    assert len(README_YAML) == 3
    text = (JOBS / "README.md").read_text()
    assert [p.name for p in JOBS.glob("*.yaml") if f"`{p.name}`" not in text] == []


def test_every_value_knows_its_file_and_line(user: Write, project: Write) -> None:
    user("mine", "extends: polaris\nnodes: 4\n")
    where = project("mine", "# why\ndefaults:\n  account: p\n")
    found = merged("mine")
    assert str(found.origin(("defaults", "account"))) == f"{where}:3"
    assert found.origin(("nodes",)).layer == "user"
    assert found.origin(("queues", "debug", "nodes")).where.endswith("polaris.yaml")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Return a function that installs a package with profiles behind an entry point."""

    def install(name: str, target: str) -> Path:
        folder = tmp_path / "site-packages"
        (folder / f"{name}-1.0.dist-info").mkdir(parents=True)
        (folder / f"{name}-1.0.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        (folder / f"{name}-1.0.dist-info" / "entry_points.txt").write_text(
            f"[qsgd_hpc.sites]\n{name} = {target}\n"
        )
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("FOLDER = __path__[0] + '/deep'\n")
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, name, raising=False)
        files._packages.cache_clear()
        return folder / name

    return install


def test_package_brings_profiles_which_the_user_overrides(
    package: Callable[[str, str], Path], user: Write
) -> None:
    (package("uni_sites", "uni_sites") / "uni.yaml").write_text(TINY)
    user("uni", "description: mine\n")
    assert sites.load("uni").description == "mine"
    layers = [source.layer for source in files.sources("uni")]
    assert layers == ["package uni_sites", "user"]


def test_entry_point_may_name_a_folder(package: Callable[[str, str], Path]) -> None:
    folder = package("uni_folder", "uni_folder:FOLDER") / "deep"
    folder.mkdir()
    (folder / "uni.yaml").write_text(TINY)
    assert sites.load("uni").description == "tiny"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_module_here", "cannot be loaded: ModuleNotFoundError"),
        ("broken_sites:FOLDER", "is not a folder"),
        ("json:dumps", "is not a folder"),
    ],
)
def test_broken_package_is_reported_and_stops_no_other_site(
    package: Callable[[str, str], Path], target: str, said: str
) -> None:
    package("broken_sites", target)
    assert sites.load("polaris").name == "polaris"
    assert sites.choose(None, sites.Host(("x",), {}, ())).name == "local"
    (fault,) = files.package_faults()
    assert said in fault
    assert f"broken_sites = {target}" in fault
