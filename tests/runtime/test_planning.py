"""The measured machine: kept in a file, found again, measured by one job only."""

from __future__ import annotations

import json
import os

import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime import planning

KEY = planning.Key("polaris", "MPICH 5.0.2", ranks=8, ranks_per_node=4, threads=2)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("QSGD_HOME", str(tmp_path))
    monkeypatch.delenv("QSGD_PLAN_CACHE", raising=False)
    return tmp_path


def a_machine(alpha_s=1e-6):
    codecs = [(spec, 1e-9, 2e-10, 3e-10) for spec in _core.usual_codes()]
    observed = [("direct", None, 1024, 1 / 3e4), ("sra", _core.usual_codes()[1], 4096, 1 / 7e4)]
    return _core.Machine(
        ranks=8,
        ranks_per_node=4,
        within=(alpha_s, 1e-10),
        across=(5e-6, 1e-9),
        codecs=codecs,
        observed=observed,
    )


class OneRank:
    """As much of mpi4py's communicator and of ours as is used, with counts."""

    def __init__(self):
        self.measured = 0

    def Get_rank(self):
        return 0

    def bcast(self, value):
        return value

    def measure(self, codecs, *, untried, ranks_per_node):
        assert ranks_per_node == KEY.ranks_per_node
        assert codecs == _core.usual_codes()
        assert untried == _core.rotated_codes()
        self.measured += 1
        return a_machine()


def test_what_is_saved_is_loaded_to_the_last_digit(home):
    measured = a_machine(alpha_s=1 / 3e6)
    path = planning.save(KEY, measured)
    assert path == home / "machines" / "polaris-MPICH-5.0.2-2x4x2-0.1.0.json"
    assert planning.to_json(planning.load(KEY)) == planning.to_json(measured)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_loaded_machine_gives_the_same_plans():
    planning.save(KEY, a_machine(alpha_s=1 / 3e6))
    loaded = planning.load(KEY)
    for count in (1, 10_000, 1 << 20, 1 << 26):
        plans = [
            _core.plan(m, count=count, codecs=_core.usual_codes())
            for m in (a_machine(alpha_s=1 / 3e6), loaded)
        ]
        assert plans[0].reason == plans[1].reason
        assert plans[0].spec == plans[1].spec


@pytest.mark.parametrize(
    "change", [{"site": "aurora"}, {"mpi": "Open MPI 5"}, {"ranks": 16}, {"threads": 1}]
)
def test_another_job_does_not_find_it(change):
    planning.save(KEY, a_machine())
    fields = {f: getattr(KEY, f) for f in ("site", "mpi", "ranks", "ranks_per_node", "threads")}
    assert planning.load(planning.Key(**{**fields, **change})) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:50],
        lambda text: text.replace('"direct"', '"fastest"'),
        lambda text: text.replace('"within"', '"without"'),
        lambda text: "[]",
    ],
)
def test_a_damaged_file_is_named_with_the_remedy(damage):
    path = planning.save(KEY, a_machine())
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    with pytest.raises(UsageError, match="remove it") as error:
        planning.load(KEY)
    assert str(path) in str(error.value)


def test_a_file_of_another_version_is_measured_again():
    path = planning.save(KEY, a_machine())
    record = json.loads(path.read_text())
    record["schema"] = 0
    path.write_text(json.dumps(record))
    assert planning.load(KEY) is None


def test_what_one_job_measures_the_next_recalls():
    job = OneRank()
    assert planning.recall(job, KEY) is None
    measured = planning.machine(job, job, KEY)
    assert planning.to_json(planning.recall(job, KEY)) == planning.to_json(measured)
    planning.machine(job, job, KEY)
    assert job.measured == 2


def test_the_cache_can_be_switched_off(home, monkeypatch):
    job = OneRank()
    planning.save(KEY, a_machine())
    monkeypatch.setenv("QSGD_PLAN_CACHE", "off")
    assert planning.recall(job, KEY) is None
    planning.load(KEY)
    (home / "machines" / KEY.path.name).unlink()
    planning.machine(job, job, KEY)
    assert list((home / "machines").iterdir()) == []


def test_a_folder_that_cannot_be_written_costs_a_warning_only(home, capsys):
    (home / "machines").write_text("not a folder")
    job = OneRank()
    assert planning.recall(job, KEY) is None
    assert "remove it" in capsys.readouterr().err  # reading tells it first
    assert planning.machine(job, job, KEY).ranks == 8
    assert "measured again by the next job" in capsys.readouterr().err


def test_a_user_without_a_home_measures_with_a_warning(monkeypatch, capsys):
    for name in ("HOME", "QSGD_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)  # has no account
    job = OneRank()
    assert planning.recall(job, KEY) is None
    assert planning.machine(job, job, KEY).ranks == 8
    assert capsys.readouterr().err.count("the home of this user is unknown. Set HOME, or") == 2


@pytest.mark.parametrize(
    ("host", "site"),
    [("nid001234", "nid"), ("x3001c0s13b0n0", "x3001c0s13b0n"), ("laptop", "laptop"), ("7", "7")],
)
def test_hosts_of_a_kind_share_a_name(monkeypatch, host, site):
    monkeypatch.delenv("QSGD_SITE", raising=False)
    monkeypatch.setattr(planning.socket, "gethostname", lambda: f"{host}.example.org")
    assert planning.site_name() == site


class Mpich:
    """As much of mpi4py's module as names the MPI."""

    @staticmethod
    def get_vendor():
        return "MPICH", (5, 0, 2)


@pytest.mark.parametrize(
    ("nodes", "per_node"),
    [
        ([[0, 1], [2, 3]], 2),
        ([[0, 1, 2, 3]], 4),
        ([[0, 2], [1, 3]], 1),
        ([[0, 1, 2], [3]], 1),
        (None, 1),
    ],
)
def test_a_measurement_holds_for_ranks_that_are_laid_out_alike(nodes, per_node):
    key = planning.key_of(Mpich, nodes, ranks=4, threads=3)
    expected = planning.Key(planning.site_name(), "MPICH 5.0.2", 4, per_node, 3)
    assert key == expected
