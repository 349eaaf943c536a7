"""Site profiles: the shipped ones are sound, and a malformed one is reported with line and key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites
from qsgd_hpc.jobs.sites.files import merged, unconfirmed
from qsgd_hpc.jobs.sites.queues import queue_faults

JOBS = Path(__file__).parents[2] / "jobs"
SHIPPED = sorted(path.stem for path in JOBS.glob("*.yaml"))
LAPTOP = sites.Host(("laptop",), {}, ())


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_are_sound(name: str) -> None:
    assert sites.load(name).name == name


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_profile_of_a_machine_names_its_sources(name: str) -> None:
    text = (JOBS / f"{name}.yaml").read_text("utf-8")
    site = sites.load(name)
    assert "# Source: " in text or site.generic or site.embedded_default


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", SHIPPED)
def test_every_key_marked_at_the_top_is_there(name: str) -> None:
    data = merged(name).data
    assert set(data.get("verify", ())) <= set(data)


def test_mark_of_a_key_that_is_not_there_is_no_open_fact(own: Path) -> None:
    (own / "polaris.yaml").write_text("verify: [proxy, left_out]\ngpu: {verify: true}\n")
    found = unconfirmed(merged("polaris"))
    assert {("proxy",), ("gpu",)} <= set(found)
    assert ("left_out",) not in found


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", SHIPPED)
def test_default_walltime_fits_a_queue_of_the_site(name: str) -> None:
    site = sites.load(name)
    least = min((q.nodes[0] for q in site.queues.values() if q.auto), default=1)
    assert queue_faults(site, None, least, site.default_walltime_min) == []


@pytest.mark.usefixtures("own")
def test_polaris_orders_gpus_in_reverse() -> None:
    gpu = sites.load("polaris").gpu
    assert gpu is not None
    assert gpu.order == ("3", "2", "1", "0")


def test_override_changes_only_its_keys(own: Path) -> None:
    (own / "polaris.yaml").write_text("defaults: {account: mine}\n")
    site = sites.load("polaris")
    assert site.default_account == "mine"
    assert site.default_filesystems == ("home", "eagle")


# Each list holds the one above ten times: 10^9 values.
LAUGHS = "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else '1'] * 10)}]\n" for n in range(9)
)


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
            "line 1: queue 'x': the least number of nodes, 2, exceeds the most",
        ),
        (
            "shell: /bin/sh\nshell: /bin/bash\n",
            "line 2: key 'shell' is duplicated, first in line 1",
        ),
        ("a: [1\nb: 2\n", "line 2: not valid YAML"),
        ("node:\n  numa: &a [*a]\n", "line 2: more than 50 levels"),
        ("node: &a {numa: [*a]}\n", "line 1: more than 50 levels"),
        (f"node: {'[' * 1000}{']' * 1000}\n", "line 1: not valid YAML"),
        (LAUGHS, "does an alias (*name) contain itself?"),
        ("gpu: {order: [0, 0, 1, 2]}\n", "must name each of the node's 4 GPUs once"),
        ("launcher: {argv: [mpiexec, '{rank}']}\n", "unknown field '{rank}'"),
        ("defaults: {queue: debgu}\n", "unknown queue 'debgu'. Did you mean 'debug'?"),
        ("- a\n- b\n", "line 1: 'profile'"),
        (
            "queues:\n  debug:\n    bins: [[1, 1, '0:30:00'], [1, 2, '1:00:00']]\n",
            "line 3: queue 'debug': two bins contain 1 nodes",
        ),
        (
            "queues: {debug: {bins: [[2, 1, '0:30:00']]}}\n",
            "the least number of nodes of a bin, 2, exceeds the most",
        ),
        ("queues: {debug: {bins: [[1, 3, '0:30:00']]}}\n", "exceeds its nodes [1, 2]"),
        (
            "queues: {debug: {bins: [[1, 2, 30]]}}\n",
            "'queues.debug.bins.0.2' must be a quoted time",
        ),
        (
            "verify: [login_host]\n",
            "unknown key 'login_host' in 'verify'. Did you mean 'login_hosts'?",
        ),
        ("queues: {prod: {routes: [smal]}}\n", "unknown queue 'smal'. Did you mean 'small'?"),
        ("scheduler: slrum\n", "'scheduler' must be one of slurm, pbs, cobalt, lsf, local; it is"),
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
    with pytest.raises(UsageError, match=r"unknown site .*(Did you mean 'polaris'|Valid: aurora)"):
        sites.load(name)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("site", "queue", "names"),
    [
        ("frontier", "batch", ("batch", None)),
        ("frontier", "debug", ("batch", "debug")),
        ("perlmutter", "regular", (None, "regular")),
        ("slurm", "anything", ("anything", None)),
    ],
)
def test_queue_stands_for_partition_and_qos(
    site: str, queue: str, names: tuple[str | None, str | None]
) -> None:
    assert sites.load(site).partition_and_qos(queue) == names


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


def test_a_user_without_a_home_finds_profiles_in_qsgd_home(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)  # has no account
    (own / "mine.yaml").write_text("extends: slurm\ndescription: mine\n")
    assert "mine" in sites.names()
    monkeypatch.delenv("QSGD_HOME")
    with pytest.raises(UsageError, match="home of this user is unknown"):
        sites.names()


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("scheduler", ["pbs", "slurm"])
def test_unknown_host_gets_the_generic_profile_of_its_scheduler(scheduler: str) -> None:
    site = sites.choose(None, sites.Host(("somewhere",), {}, (scheduler,)))
    assert (site.name, site.generic) == (scheduler, True)


@pytest.mark.usefixtures("own")
def test_slurm_beats_pbs_because_slurm_brings_a_qsub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("qsub", "sbatch", "scontrol"):
        (tmp_path / command).write_text("#!/bin/sh\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sites.choose(None, sites.find_host()).name == "slurm"


@pytest.mark.usefixtures("own")
def test_slurms_commands_without_a_slurm_do_not_make_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command, code in (("sbatch", 0), ("scontrol", 1)):
        (tmp_path / command).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    assert sites.choose(None, sites.find_host()).name == "local"


@pytest.mark.usefixtures("own")
def test_scheduler_that_no_profile_fits_asks_for_the_site() -> None:
    with pytest.raises(UsageError, match=r"has bsub, but no site profile.*local, pbs, perlmutter"):
        sites.choose(None, sites.Host(("somewhere",), {}, ("lsf",)))


def test_broken_profile_of_another_site_does_no_harm(own: Path) -> None:
    (own / "polaris.yaml").write_text("quue: 1\n")
    assert sites.choose(None, LAPTOP).name == "local"
