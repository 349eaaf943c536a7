"""Requests are filled from the profile, and refused with every fault and its remedy at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites
from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.queues import pick, queue_faults
from qsgd_hpc.jobs.validate import Facts, fill, request_faults, site_faults
from qsgd_hpc.jobs.words import clock, minutes

NOTHING_WRONG = Facts()


def faults(site_name: str, facts: Facts = NOTHING_WRONG, **fields: Any) -> str:
    """Return all faults of a request, one a line."""
    site = sites.load(site_name)
    filled = fill(JobRequest(Path("train.py"), **fields), site)
    return "\n".join([*request_faults(filled, facts), *site_faults(filled, site, facts)])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30m", 30),
        ("90s", 1.5),
        ("2h", 120),
        ("1:00:00", 60),
        ("1h30m", 90),
        ("1d", 1440),
        ("0:00:30", 0.5),
    ],
)
def test_walltimes_are_read(text: str, value: float) -> None:
    assert minutes(text) == value


@pytest.mark.parametrize("text", ["", "30", "0m", "-5m", "1:00", "1:99:00", "soon", "3 weeks"])
def test_other_walltimes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="30m, 90s, 2h"):
        minutes(text)


def test_clock_rounds_up_to_a_second() -> None:
    assert [clock(0.01), clock(90), clock(168 * 60)] == ["00:00:01", "01:30:00", "168:00:00"]


@pytest.mark.parametrize(
    ("nodes", "walltime_min", "queue"),
    [
        (1, 30, "debug"),
        (8, 60, "debug-scaling"),
        (10, 61, "prod"),
        (4, 300, "capacity"),
        (496, 1440, "prod"),
        (8, 61, None),
        (12, 300, None),
    ],
)
def test_polaris_queue_is_chosen_by_size(
    nodes: int, walltime_min: float, queue: str | None
) -> None:
    picked = pick(sites.load("polaris"), nodes, walltime_min)
    assert (picked and picked.name) == queue


def test_every_size_gets_a_fitting_queue_or_a_fault() -> None:
    site = sites.load("polaris")
    for nodes in range(1, 600, 7):
        for walltime_min in (1, 5, 60, 61, 180, 181, 360, 361, 1440, 1441, 10081):
            refused = queue_faults(site, None, nodes, walltime_min)
            assert bool(refused) == (pick(site, nodes, walltime_min) is None)


def test_job_that_prod_would_swallow_is_refused() -> None:
    text = faults("polaris", nodes=12, walltime_min=300, queue="prod", account="p")
    assert "lose the job without a word" in text
    assert "--nodes 25 or --walltime 03:00:00 or less" in text


def test_queue_behind_a_route_is_refused() -> None:
    text = faults("polaris", nodes=12, walltime_min=60, queue="small", account="p")
    assert "Use --queue prod." in text


def test_queue_out_of_range_names_those_that_fit() -> None:
    text = faults("polaris", nodes=8, walltime_min=30, queue="prod", account="p")
    assert "takes 10 to 496 nodes, not 8. It fits --queue debug-scaling" in text


def test_all_faults_come_at_once() -> None:
    facts = Facts("there is no script '/x/trian.py'.", ("train.py",), "qsub")
    text = faults(
        "polaris", facts, nodes=8, ranks_per_node=5, filesystems=("hom",), queue="debg",
        name="my job", env={"1A": "x"},
    )  # fmt: skip
    for part in (
        "there is no script",
        "--name 'my job'",
        "Try --name my_job",
        "--env '1A'",
        "no queue 'debg'. Did you mean 'debug'?",
        "needs the account",
        "4 GPUs",
        "no filesystem 'hom'. Did you mean 'home'?",
        "submits with qsub, which is not on PATH",
    ):
        assert part in text
    assert len(text.splitlines()) == 8


@pytest.mark.parametrize("nodes", [0, -3])
def test_no_nodes_is_one_fault(nodes: int) -> None:
    assert faults("polaris", nodes=nodes, account="p").count("\n") == 0


def test_perlmutter_account_gets_its_suffix_once() -> None:
    site = sites.load("perlmutter")
    for account in ("m1234", "m1234_g"):
        assert fill(JobRequest(Path("t.py"), account=account), site).account == "m1234_g"


def test_argument_beats_environment_for_the_account() -> None:
    site = sites.load("polaris")
    assert fill(JobRequest(Path("t.py"), account="a"), site, {"account": "b"}).account == "a"
    assert fill(JobRequest(Path("t.py")), site, {"account": "b"}).account == "b"


def test_one_rank_per_gpu_and_one_without_gpus() -> None:
    assert fill(JobRequest(Path("t.py"), nodes=8), sites.load("polaris")).ranks == 32
    assert fill(JobRequest(Path("t.py"), nodes=8), sites.load("local")).ranks == 8


@pytest.mark.parametrize(
    "script", ["train.py", "1.py", "x y.py", "é.py", "---.py", "a" * 40 + ".py"]
)
def test_default_name_is_valid_everywhere(script: str) -> None:
    site = sites.load("local")
    filled = fill(JobRequest(Path(script)), site)
    assert request_faults(filled, Facts()) == []
    assert 1 <= len(filled.name or "") <= 15


@pytest.fixture(autouse=True)
def _no_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSGD_HOME", str(tmp_path))
