"""Studies over several networks: their points, what is compared, and what is marked."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites
from qsgd_hpc.scaling.analysis.compute import analyse
from qsgd_hpc.scaling.define.definition import define
from qsgd_hpc.scaling.define.study import Case, Point, Study, plan
from qsgd_hpc.scaling.report.cautions import Machine, cautions
from qsgd_hpc.scaling.report.networks import families
from qsgd_hpc.scaling.report.origins import origins
from qsgd_hpc.scaling.report.report import context, load, render
from qsgd_hpc.scaling.run.study_jobs import point_request
from tests.scaling.samples import metered, study, written

NETWORKS = ("100mbit", "10gbit", "none")
# What compressing gains on each, by bits.
SPEEDS = {"100mbit": {32: 100.0, 4: 600.0}, "10gbit": {32: 1000.0, 4: 900.0}}


def measured(whole: Study, reached: float = 0.95):
    """Return an attempt for each point; links reach this share of their rate."""
    return [one(point, reached) for point in plan(whole)]


def one(point: Point, reached: float):
    speed = SPEEDS.get(point.case.network, {}).get(point.bits, 1000.0)
    speed *= 1 + point.repeat / 1000
    made = metered(point, speed=speed if point.ranks > 1 else 800.0)
    if point.case.network == "none" or point.nodes == 1:
        return made
    rate = {"100mbit": 1e8, "10gbit": 1e10}[point.case.network]
    link = {
        "event": "network",
        "network": point.case.network,
        "rate_bits_s": rate,
        "hosts": point.nodes,
        "reached_before_bits_s": [rate * 0.95] * point.nodes,
        "reached_after_bits_s": [rate * 0.95, rate * reached],
        "sent_bytes": [1, 2],
    }
    return dataclasses.replace(made, records=(*made.records, link))


def test_points_are_crossed_with_networks_but_for_what_no_network_is_in():
    whole = study(networks=NETWORKS, bits=(32, 4), nodes=(1, 2))
    points = plan(whole)
    assert len(points) == 1 + 3 * 2
    assert len({p.key for p in points}) == len(points)
    assert {p.case.network for p in points if p.nodes == 2} == set(NETWORKS)
    of_two = plan(study(networks=NETWORKS, bits=(32, 4), nodes=(1, 2), ranks_per_node=2))
    assert len([p for p in of_two if p.nodes == 1]) == 2  # 32 and 4 bit, on no network


def test_a_points_job_is_on_its_network():
    whole = study(networks=("1gbit,latency=50us",))
    (point, *_) = [p for p in plan(whole) if p.nodes == 2]
    assert point_request(whole, point, Path("/records")).network == "1gbit,latency=50us"
    plain = study()
    assert point_request(plain, plan(plain)[0], Path("/records")).network is None


def test_names_of_cases_say_their_network():
    case = Case("mnist", "torch", 128, network="1gbit,latency=50us")
    assert case.key == "mnist-torch-batch128-net-1gbit-latency-50us"
    assert case.label == "mnist (torch), batch 128, 1 Gb/s, 50 µs"
    assert Case("mnist", network="none").label == "mnist, batch 128, shared memory"


def test_a_definition_with_networks_survives_its_json_and_an_older_one_is_read():
    whole = study(networks=NETWORKS)
    assert Study.from_json(whole.to_json()) == whole
    old = {k: v for k, v in study().to_json().items() if k != "networks"}
    assert Study.from_json(old) == study()


def test_wishes_are_read_into_one_spelling_and_all_faults_are_told(tmp_path):
    (tmp_path / "train.py").touch()
    wishes = {"scripts": ["train.py"], "networks": ["1000 mbit", "1gbit", "None", "10gbit"]}
    local = sites.load("local")
    assert define(wishes, tmp_path, local, tmp_path).networks == ("1gbit", "none", "10gbit")
    with pytest.raises(UsageError) as error:
        define({**wishes, "networks": ["1gb", "0gbit"]}, tmp_path, local, tmp_path)
    assert len(str(error.value).splitlines()) == 2
    with pytest.raises(UsageError, match="polaris has its own network"):
        define({**wishes, "networks": ["1gbit"]}, tmp_path, sites.load("polaris"), tmp_path)


def test_where_compressing_pays_is_said_network_by_network_the_slowest_first():
    whole = study(networks=("none", "10gbit", "100mbit"), bits=(32, 4), repeats=3)
    (family,) = families(analyse(measured(whole), cases=whole.cases).cases)
    assert [m.case.network for m in family.members] == ["100mbit", "10gbit", "none"]
    said = family.sentence
    assert "At 100 Mb/s compressing pays: 4 bit trains 6.00× as fast as fp32." in said
    assert "At 10 Gb/s compressing does not pay: 4 bit trains at 0.90× the speed of fp32." in said
    same = "compressing does not pay: 4 bit trains as fast as fp32, within 1%."
    assert f"In shared memory {same}" in said
    once = study(networks=("none", "100mbit"), bits=(32, 4))
    (family,) = families(analyse(measured(once), cases=once.cases).cases)
    assert family.sentence == (
        "At 100 Mb/s 4 bit sent 7.88× fewer bytes and trained at 6.00× the speed of fp32 (one run)."
        " In shared memory 4 bit sent 7.88× fewer bytes and trained at 1.00× the speed of fp32 ("
        "one run). At least three runs of each (--repeats 3) are needed to tell where compressing "
        "pays."
    )
    rows = list(family.table())
    assert [(r["network"], r["bits"], r["ratio"]) for r in rows[:2]] == [
        ("100 Mb/s", "fp32", "–"),
        ("100 Mb/s", "4 bit", "6.00×"),
    ]
    assert rows[1]["sooner"] == "6.00×"


def test_what_compressing_gains_over_several_ranks_is_not_above_ideal():
    whole = study(networks=("100mbit",), bits=(32, 4), nodes=(2,))
    found = analyse(measured(whole), cases=whole.cases)
    assert found.cases[0].table["efficiency"].max() == pytest.approx(6.0)
    heads = [c.split(":")[0] for c in cautions(found, mode="strong", machine=Machine.EMULATED)]
    assert heads[:2] == ["Noise", "Emulated network"]


def test_one_network_is_no_family_and_one_node_has_no_network():
    whole = study(networks=("100mbit",), bits=(32, 4))
    assert families(analyse(measured(whole), cases=whole.cases).cases) == []
    alone = study(networks=NETWORKS, bits=(32, 4), nodes=(1,))
    assert families(analyse(measured(alone), cases=alone.cases).cases) == []


@pytest.mark.parametrize(
    ("reached", "marked"),
    [
        (0.7, True),
        # Each draws all charts.
        pytest.param(0.95, False, marks=pytest.mark.full),
        pytest.param(0.901, False, marks=pytest.mark.full),
    ],
)
def test_links_that_fell_short_are_marked(tmp_path, reached, marked):
    whole = study(networks=("100mbit", "10gbit"), bits=(32, 4), workdir=tmp_path)
    report = load(written(tmp_path / "study", whole, measured(whole, reached)))
    assert report.origins.machine is Machine.EMULATED
    shown = context(report, [["plot"]] * 2, None)
    html, markdown = render("report.html.j2", shown), render("report.md.j2", shown)
    for text in (html, markdown):
        assert "hosts and network emulated on one machine" in text
        assert "Effect of the network" in text
        assert ("(short)" in text) is marked
        assert ("Short links" in text) is marked
        assert "share this machine" in text
    assert html.count('id="networks-1-networks"') == html.count('id="networks-1-times"') == 1
    table = report.analysis.cases[0].table
    two = table[table["nodes"] == 2]["link_share"]
    assert two.tolist() == pytest.approx([min(0.95, reached)] * 2)
    assert math.isnan(table[table["nodes"] == 1]["link_share"].iloc[0])


def test_a_point_that_did_not_run_on_its_network_is_no_measurement():
    whole = study(networks=("100mbit",), bits=(32, 4))
    (point, *_) = [p for p in plan(whole) if p.nodes == 2]
    good = one(point, 0.95)
    assert good.fault is None
    lost = dataclasses.replace(good, records=good.records[:-1])
    assert "planned for a network of 100mbit" in lost.fault
    assert "the machine's own memory" in lost.fault


def test_a_study_without_networks_says_nothing_of_them():
    whole = study()
    attempts = [metered(p, speed=100.0) for p in plan(whole)]
    found = analyse(attempts, cases=whole.cases)
    assert found.cases[0].table["link_bits_s"].isna().all()
    assert origins(attempts).machine is not Machine.EMULATED
