"""What schedulers say of their machines is read from recordings, and compared with profiles."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from qsgd_hpc.jobs import sites
from qsgd_hpc.jobs.sites.check import differences
from qsgd_hpc.jobs.sites.draft import draft
from qsgd_hpc.jobs.sites.live import (
    Live,
    LiveQueue,
    parse_gpus,
    parse_nodes,
    parse_partitions,
    parse_qos,
    parse_queues,
    parse_server,
    slurm_minutes,
)
from qsgd_hpc.jobs.sites.profile import Queue, Site

FIXTURES = Path(__file__).parent.parent / "fixtures"
HOUR, DAY = 60.0, 1440.0


@pytest.fixture(autouse=True)
def _no_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSGD_HOME", str(tmp_path))


def recorded(name: str) -> str:
    return (FIXTURES / f"{name}.out").read_text("utf-8")


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("2-00:00:00", 2 * DAY),
        ("1-12", DAY + 12 * HOUR),
        ("1-12:30", DAY + 12 * HOUR + 30),
        ("00:30:00", 30),
        ("5:00", 5),
        ("1:00:00", HOUR),
        ("30", 30),
        ("00:00:30", 0.5),
        ("UNLIMITED", None),
        ("", None),
        ("NONE", None),
    ],
)
def test_times_of_slurm_are_read(text: str, minutes: float | None) -> None:
    assert slurm_minutes(text) == minutes


def test_partitions_are_read_from_scontrol() -> None:
    queues, default, nodes = parse_partitions(recorded("slurm/scontrol_part"))
    assert (list(queues), default, nodes) == (["regular", "debug", "shared"], "regular", 8)
    assert queues["regular"].nodes == (1, 8)
    assert queues["regular"].walltime_min == (None, 2 * DAY)
    assert queues["debug"].walltime_min == (None, 5)
    assert all(q.cpus == (128,) and q.is_open for q in queues.values())


@pytest.mark.parametrize("fact", ["State=DOWN", "AllowAccounts=staff", "Hidden=YES"])
def test_partition_that_is_not_for_everyone_is_not_open(fact: str) -> None:
    key = fact.split("=")[0]
    line = recorded("slurm/scontrol_part").splitlines()[0]
    changed = " ".join(fact if w.startswith(f"{key}=") else w for w in line.split())
    assert changed != line
    assert not parse_partitions(changed)[0]["regular"].is_open


def test_gpus_are_read_from_sinfo() -> None:
    assert parse_gpus(recorded("slurm/sinfo")) == {
        "regular": (4,), "debug": (4,), "shared": (4,)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:4", 4),
        ("gpu:a100:4(S:0-1)", 4),
        ("craynetwork:4,gpu:a100:2,gpu:v100:1", 3),
        ("(null)", 0),
        ("nogpu:3", 0),
    ],
)
def test_gpus_are_counted_in_every_spelling_of_gres(gres: str, gpus: int) -> None:
    assert parse_gpus(f"big*|up|1:00|8|0/8/0/8|{gres}\n") == {"big": (gpus,)}


def test_partition_of_two_kinds_of_nodes_has_both_numbers_of_gpus() -> None:
    text = "all|up|1:00|8|0/8/0/8|gpu:4\nall|up|1:00|2|0/2/0/2|(null)\n"
    assert parse_gpus(text) == {"all": (0, 4)}


def test_qos_are_read_from_sacctmgr() -> None:
    found = parse_qos(recorded("slurm/sacctmgr_qos"))
    assert list(found) == ["normal", "regular", "debug"]
    assert found["debug"].nodes == (None, 8)
    assert found["debug"].walltime_min == (None, 30)
    assert found["normal"].walltime_min == (None, None)


def test_queues_are_read_from_qstat() -> None:
    queues = parse_queues(json.loads(recorded("pbs/qstat_Q")))
    assert queues["large"].nodes == (100, 496)
    assert queues["large"].walltime_min == (5 / 60, DAY)
    assert queues["large"].route_only
    assert queues["prod"].routes == ("small", "medium", "large")
    assert queues["prod"].walltime_min == (None, DAY)
    assert queues["workq"].nodes == (None, None)
    assert all(q.is_open for q in queues.values())


@pytest.mark.parametrize(
    "facts",
    [
        {"enabled": "False", "started": "True"},
        {"enabled": "True", "started": "False"},
        {"enabled": "True", "started": "True", "acl_group_enable": "True"},
    ],
)
def test_pbs_queue_that_is_shut_or_for_some_is_not_open(facts: dict[str, Any]) -> None:
    assert not parse_queues({"Queue": {"q": facts}})["q"].is_open


def test_server_names_default_queue_and_file_systems() -> None:
    answer = json.loads(recorded("pbs/qstat_B"))
    assert parse_server(answer) == ((), "workq")
    facts = next(iter(answer["Server"].values()))
    facts["resources_available"] = {"valid_filesystems": "home,eagle"}
    assert parse_server(answer) == (("home", "eagle"), "workq")


def test_nodes_are_counted_by_host() -> None:
    answer = json.loads(recorded("pbs/pbsnodes"))
    assert parse_nodes(answer) == (2, (64,), (4,))
    for facts in answer["nodes"].values():
        facts["resources_available"]["host"] = "x3001"  # two vnodes of one host
    assert parse_nodes(answer) == (1, (128,), (8,))


def machine() -> Live:
    """Return a machine that is as Polaris' profile says."""
    site = sites.load("polaris")
    queues = {
        q.name: LiveQueue(
            q.name, q.nodes, q.walltime_min, routes=q.routes, route_only=q.via is not None
        )
        for q in site.queues.values()
    }
    return Live("pbs", queues, nodes=560, cpus=(64,), gpus=(4,), filesystems=("eagle", "home"))


def found(live: Live, site: Site | None = None) -> list[tuple[str, str]]:
    rows = differences(site or sites.load("polaris"), live)
    return [(".".join(map(str, row.path)), row.change) for row in rows]


def changed(name: str, **facts: Any) -> Live:
    live = machine()
    return dataclasses.replace(
        live, queues={**live.queues, name: dataclasses.replace(live.queues[name], **facts)}
    )


def test_machine_that_is_as_its_profile_says_has_no_difference() -> None:
    assert found(machine()) == []
    assert found(Live("pbs")) == []


@pytest.mark.parametrize(
    ("facts", "row"),
    [
        ({"nodes": 559}, ("nodes", "nodes: 559")),
        ({"gpus": (8,)}, ("node.gpus", "gpus: 8")),
        ({"filesystems": ("home",)}, ("filesystems", "filesystems: [home]")),
        ({"cpus": (256,)}, ("node.cores", "cores: 256, or half of that with two threads per core")),
    ],
)
def test_difference_of_the_machine_names_key_and_new_text(
    facts: dict[str, Any], row: tuple[str, str]
) -> None:
    assert found(dataclasses.replace(machine(), **facts)) == [row]


@pytest.mark.parametrize(
    ("name", "facts", "row"),
    [
        ("debug", {"nodes": (1, 4)}, ("queues.debug.nodes", "nodes: [1, 4]")),
        ("debug", {"nodes": (None, 4)}, ("queues.debug.nodes", "nodes: [1, 4]")),
        (
            "capacity",
            {"walltime_min": (5.0, 60.0)},
            ("queues.capacity.walltime", 'walltime: ["00:05:00", "01:00:00"]'),
        ),
        ("prod", {"routes": ("small",)}, ("queues.prod.routes", "routes: [small]")),
        ("debug", {"route_only": True}, ("queues.debug.via", "via: ITS ROUTE")),
    ],
)
def test_difference_of_a_queue_names_key_and_new_text(
    name: str, facts: dict[str, Any], row: tuple[str, str]
) -> None:
    assert found(changed(name, **facts)) == [row]


def test_queue_that_is_gone_or_new_is_a_difference() -> None:
    live = machine()
    queues = {name: queue for name, queue in live.queues.items() if name != "demand"}
    queues["new"] = LiveQueue("new")
    queues["staff"] = LiveQueue("staff", is_open=False)
    assert found(dataclasses.replace(live, queues=queues)) == [
        ("queues.demand", "delete this entry"),
        ("queues", "add new, or name it in left_out"),
    ]


def test_queue_that_is_left_out_on_purpose_is_no_difference() -> None:
    live = machine()
    live = dataclasses.replace(live, queues={**live.queues, "R123": LiveQueue("R123")})
    assert found(live, dataclasses.replace(sites.load("polaris"), left_out=("R*",))) == []


def test_tighter_of_partition_and_qos_counts() -> None:
    site = dataclasses.replace(
        sites.load("slurm"),
        queues={"dev": Queue("dev", (1, 8), (1 / 60, 60.0), partition="batch", qos="debug")},
    )
    live = Live(
        "slurm",
        {"batch": LiveQueue("batch", (1, 100), (None, 720.0))},
        {"debug": LiveQueue("debug", (None, 4), (None, None))},
    )
    assert found(live, site) == [
        ("queues.dev.nodes", "nodes: [1, 4]"),
        ("queues.dev.walltime", 'walltime: ["00:00:01", "12:00:00"]'),
    ]


def test_tiles_are_not_compared_with_cards() -> None:
    aurora = sites.load("aurora")
    assert aurora.gpus == 12
    assert list(differences(aurora, Live("pbs", gpus=(6,)))) == []
    assert len(list(differences(aurora, Live("pbs", gpus=(4,))))) == 1


def test_gpus_of_a_partition_are_compared_with_those_of_its_queue() -> None:
    site = sites.load("stampede3")
    queues = {
        q.name: LiveQueue(q.name, q.nodes, (None, q.walltime_min[1]), gpus=(site.at(q.name).gpus,))
        for q in site.queues.values()
    }
    live = Live("slurm", queues, gpus=(0, 4))
    assert found(live, site) == []
    queues["skx"] = dataclasses.replace(queues["skx"], gpus=(4,))
    assert found(live, site) == [("queues.skx.gpus", "gpus: 4")]


@pytest.mark.parametrize("scheduler", ["pbs", "slurm"])
def test_draft_of_an_unknown_machine_is_a_profile_to_fill_in(
    scheduler: str, tmp_path: Path
) -> None:
    (tmp_path / "sites").mkdir()
    text = draft("mine", Live(scheduler), scheduler, None)
    (tmp_path / "sites" / "mine.yaml").write_text(text)
    assert sites.load("mine").scheduler == scheduler


def test_draft_keeps_odd_names_as_text(tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    names = ["no", "1e3", "a: b", "[x]", "ok", "null", "#c"]
    live = Live("slurm", {name: LiveQueue(name, total_nodes=2) for name in names}, nodes=2)
    (tmp_path / "sites" / "mine.yaml").write_text(draft("mine", live, "slurm", "login1"))
    assert sorted(sites.load("mine").queues) == sorted(names)
    assert sites.load("mine").login_hosts == ("login*",)


def test_draft_keeps_odd_values_as_text(tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    route = LiveQueue("in", routes=("yes", "off"))
    behind = [LiveQueue(name, (1, 2), route_only=True) for name in ("yes", "off")]
    queues = {queue.name: queue for queue in (route, *behind)}
    live = Live("pbs", queues, nodes=2, filesystems=("no", "on", "1"))
    (tmp_path / "sites" / "mine.yaml").write_text(draft("mine", live, "pbs", None))
    site = sites.load("mine")
    assert site.filesystems == ("no", "on", "1")
    assert site.queues["in"].routes == ("yes", "off")
    assert site.queues["yes"].via == "in"
