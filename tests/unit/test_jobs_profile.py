"""Site profiles: the shipped ones are sound, and a malformed one is reported with line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites

LAPTOP = sites.Host(("laptop",), {}, ())


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's profiles."""
    monkeypatch.setenv("QSGD_HOME", str(tmp_path))
    monkeypatch.delenv("QSGD_SITE", raising=False)
    folder = tmp_path / "sites"
    folder.mkdir()
    return folder


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", ["local", "perlmutter", "polaris"])
def test_shipped_profiles_are_sound(name: str) -> None:
    assert sites.load(name).name == name


@pytest.mark.usefixtures("own")
def test_polaris_orders_gpus_in_reverse() -> None:
    gpu = sites.load("polaris").gpu
    assert gpu is not None
    assert gpu.order == (3, 2, 1, 0)


def test_override_changes_only_its_keys(own: Path) -> None:
    (own / "polaris.yaml").write_text("defaults: {account: mine}\n")
    site = sites.load("polaris")
    assert site.default_account == "mine"
    assert site.default_filesystems == ("home", "eagle")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "# mine\nquue: debug\n",
            "site 'polaris', line 2: unknown key 'quue'. Did you mean 'queues'?",
        ),
        (
            "defaults:\n  quue: debug\n",
            "site 'polaris', line 2: unknown key 'quue' in 'defaults'. Did you mean 'queue'?",
        ),
        (
            "queues:\n  debug:\n    nodes: [1, two]\n    walltime: ['0:05:00', '1:00:00']\n",
            "line 3: 'queues.debug.nodes.1' must be two whole numbers [least, most]",
        ),
        ("queues: {x: {nodes: [1, 2]}}\n", "line 1: key 'walltime' is missing in 'queues.x'"),
        (
            "queues: {x: {nodes: [2, 1], walltime: ['0:05:00', '1:00:00']}}\n",
            "line 1: queue 'x' takes from 2 nodes to fewer",
        ),
        (
            "shell: /bin/sh\nshell: /bin/bash\n",
            "line 2: key 'shell' is there twice, first in line 1",
        ),
        ("a: [1\nb: 2\n", "line 2: not valid YAML"),
        ("gpu: {order: [0, 0, 1, 2]}\n", "must name each of the node's 4 GPUs 0..3 once"),
        ("launcher: {argv: [mpiexec, '{rank}']}\n", "unknown field '{rank}'"),
        ("defaults: {queue: debgu}\n", "unknown queue 'debgu'. Did you mean 'debug'?"),
        ("- a\n- b\n", "line 1: 'profile'"),
    ],
)
def test_malformed_profile_names_line_and_key(own: Path, text: str, message: str) -> None:
    (own / "polaris.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        sites.load("polaris")
    assert message in str(caught.value)
    assert str(own / "polaris.yaml") in str(caught.value)


def test_override_may_name_one_key_of_a_queue(own: Path) -> None:
    (own / "polaris.yaml").write_text("queues: {demand: {auto: true}}\n")
    demand = sites.load("polaris").queues["demand"]
    assert demand.auto
    assert demand.nodes == (1, 56)


def test_all_faults_of_a_profile_come_at_once(own: Path) -> None:
    (own / "polaris.yaml").write_text("quue: 1\nnode: {gpus: four}\nshel: /bin/sh\n")
    with pytest.raises(UsageError) as caught:
        sites.load("polaris")
    assert len(str(caught.value).splitlines()) == 3


def test_new_profile_needs_every_required_key(own: Path) -> None:
    (own / "mine.yaml").write_text("description: x\n")
    with pytest.raises(UsageError, match="key 'scheduler' is missing"):
        sites.load("mine")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", ["polarsi", "../polaris", "", "a b"])
def test_unknown_site_lists_or_suggests(name: str) -> None:
    with pytest.raises(UsageError, match=r"unknown site .*(Did you mean 'polaris'|Valid: local)"):
        sites.load(name)


@pytest.mark.usefixtures("own")
def test_machine_without_scheduler_is_local() -> None:
    assert sites.choose(None, LAPTOP).scheduler == "local"


@pytest.mark.usefixtures("own")
def test_login_host_chooses_its_site() -> None:
    host = sites.Host(("polaris-login-02",), {}, ("pbs",))
    assert sites.choose(None, host).name == "polaris"


@pytest.mark.usefixtures("own")
def test_argument_beats_environment_beats_host() -> None:
    host = sites.Host(("polaris-login-02",), {"QSGD_SITE": "perlmutter"}, ("pbs",))
    assert sites.choose(None, host).name == "perlmutter"
    assert sites.choose("local", host).name == "local"


@pytest.mark.usefixtures("own")
def test_scheduler_on_an_unknown_host_asks_for_the_site() -> None:
    with pytest.raises(UsageError, match=r"has qsub, but no site profile.*local, perlmutter, pol"):
        sites.choose(None, sites.Host(("somewhere",), {}, ("pbs",)))


def test_broken_profile_of_another_site_does_no_harm(own: Path) -> None:
    (own / "polaris.yaml").write_text("quue: 1\n")
    assert sites.choose(None, LAPTOP).name == "local"
