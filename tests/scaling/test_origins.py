"""The report says where its numbers come from, and what was not the same for all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsgd_hpc.scaling.define.study import plan
from qsgd_hpc.scaling.report.origins import origins
from tests.scaling.samples import attempts, metered, metered_attempts, several, study

PLACE = {
    "scheduler_job": "4711",
    "nodes": "bench-[01-02]",
    "modules": ["gcc/13.2", "cray-mpich/8.1"],
    "gpus": ["NVIDIA A100"] * 4,
    "governor": "performance",
    "clock_khz": [1_500_000, 3_675_000, 2_800_000],
}


def heads(found):
    return [caution.split(":")[0] for caution in origins(found).cautions]


def test_every_known_fact_is_told_and_no_other():
    found = [metered(p, speed=9.0, place=PLACE, threads=4) for p in plan(study())]
    facts = dict(origins(found).facts)
    assert facts["Nodes"] == "bench-01, bench-02"
    assert facts["Clock"] == "1.50 to 3.67 GHz, governor performance"
    assert facts["Modules"] == "gcc/13.2, cray-mpich/8.1"
    assert facts["Threads"] == "4 threads per rank"
    assert "GPU" not in facts  # the script says that it trained on none
    bare = dict(origins(attempts(study())).facts)
    assert not {"Clock", "Modules", "GPU", "Threads"} & set(bare)


@pytest.mark.parametrize("hosts", [2, "nid0,nid1"])
def test_a_field_of_the_scripts_own_is_no_list_of_hosts(hosts):
    facts = dict(origins([metered(p, speed=9.0, hosts=hosts) for p in plan(study())]).facts)
    assert facts.get("Nodes") == dict(
        origins([metered(p, speed=9.0, hosts=None) for p in plan(study())]).facts
    ).get("Nodes")


def test_the_gpu_is_the_one_trained_on_or_those_that_are_there():
    (point,) = plan(study(nodes=(1,)))
    used = metered(point, speed=9.0, gpu="NVIDIA H100", place=PLACE)
    assert dict(origins([used]).facts)["GPU"] == "NVIDIA H100"
    silent = attempts(study(nodes=(1,)))[0]
    final = {**silent.final, "place": PLACE}
    found = replace(silent, records=(final,))
    assert dict(origins([found]).facts)["GPU"] == "NVIDIA A100"


def test_points_of_different_machines_or_settings_are_pointed_out():
    first, *others = plan(study())
    found = [metered(p, speed=9.0, place=PLACE) for p in others]
    for changed, word in (
        ({"place": {**PLACE, "governor": "powersave"}}, "clock governor (2 versions)"),
        ({"place": {**PLACE, "modules": ["gcc/14"]}}, "modules (2 versions)"),
        ({"place": PLACE, "cpu": "Another"}, "processor (2 versions)"),
        ({"place": PLACE, "gpu": "NVIDIA H100"}, "GPU (2 versions)"),
    ):
        mixed = origins([metered(first, speed=9.0, **changed), *found]).cautions
        assert word in mixed[0]
    assert heads([metered(first, speed=9.0, place=PLACE), *found]) == []


def test_scripts_and_software_may_differ_between_programs_but_not_within_one():
    found = metered_attempts(several(nodes=(1,)))
    own = {a.point.case.workload: a.point.case.workload * 8 for a in found}
    apart = [
        replace(a, provenance={**a.provenance, "script_sha256": own[a.point.case.workload]})
        for a in found
    ]
    assert heads(apart) == []
    changed = replace(apart[0], provenance={**apart[0].provenance, "script_sha256": "f" * 64})
    again = replace(changed, point=replace(changed.point, repeat=2))
    assert heads([*apart, again]) == ["Mixed points"]


def test_a_machine_with_more_to_do_than_cores_is_pointed_out():
    quiet, *others = plan(study())
    found = [metered(p, speed=9.0, load=2.1) for p in others]
    assert heads([metered(quiet, speed=9.0, load=2.9), *found]) == []
    (told,) = origins([metered(quiet, speed=9.0, load=8.4), *found]).cautions
    assert told.startswith("Busy machine: At the end of 1 of 4 runs")
    assert "load 8.4 on 2 logical cores" in told


def test_jobs_name_their_case_where_there_are_several():
    (line, *_) = origins(metered_attempts(several(nodes=(1,)))).jobs
    assert line["point"].startswith("ptb-small (torch), batch 64, 1 node, fp32, repeat 1")
    (line, *_) = origins(attempts(study(nodes=(1,)))).jobs
    assert line["point"] == "1 node, fp32, repeat 1"
    assert line["command"].startswith("QSGD_BITS=32 /home/ada/train.py")
