"""The tables of a study recover the truth of synthetic data."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsgd_hpc.scaling.analysis.compute import COLUMNS, analyse
from qsgd_hpc.scaling.define.study import Case, Point, plan
from qsgd_hpc.scaling.store import Attempt
from tests.scaling.samples import (
    CASE,
    amdahl,
    attempt,
    attempts,
    engine_only,
    metered,
    metered_attempts,
    several,
    study,
    wire_bytes,
)


def only(found, **options):
    (case,) = analyse(found, **options).cases
    return case


def rows_by_size(found):
    return {(r["ranks"], r["bits"]): r for r in only(found).rows()}


@pytest.mark.parametrize(("name", "value"), [("test_accuracy", 98.8), ("perplexity", 0.5)])
def test_a_quality_that_cannot_be_is_not_used_and_named(name, value):
    points = plan(study(nodes=(2,), bits=(32, 4)))
    found = analyse([attempt(p, speed=1.0, **{"test_accuracy": None, name: value}) for p in points])
    assert found.cases[0].quality == ""
    assert f"2 of 2 measurements record an impossible {name}, such as {value}" in found.cautions[0]


@pytest.mark.parametrize("planned", [256, 128], ids=["ignored", "of a study of the other mode"])
def test_a_batch_that_is_not_that_of_the_mode_is_pointed_out(planned):
    weak, strong = (metered_attempts(study(mode=mode, bits=(32,))) for mode in ("weak", "strong"))
    batches = {1: 128, 2: planned}
    assert analyse([replace(a, global_batch=128) for a in strong]).cautions == ()
    found = [replace(a, global_batch=batches[a.point.ranks]) for a in weak]
    assert analyse(found, mode="weak").cautions == ()
    found = [replace(a, global_batch=batches[a.point.ranks]) for a in strong]
    (caution,) = analyse(found, mode="weak").cautions
    assert "In 1 of 2 measurements" in caution and "128 instead of 256 (2 nodes, fp32)" in caution


def test_amdahls_law_is_recovered():
    rows = rows_by_size(attempts(study(nodes=(1, 2, 4, 8), bits=(32,))))
    for ranks in (1, 2, 4, 8):
        speedup = 1 / (0.1 + 0.9 / ranks)
        assert rows[ranks, 32]["speedup"] == pytest.approx(speedup)
        assert rows[ranks, 32]["efficiency"] == pytest.approx(speedup / ranks)


@settings(max_examples=25, deadline=None)
@given(st.floats(0, 1), st.integers(1, 4), st.sampled_from([(1, 2), (2, 4, 16), (3, 5)]))
def test_a_speedup_is_never_above_amdahls(serial, per_node, nodes):
    whole = study(nodes=nodes, bits=(32, 8), ranks_per_node=per_node)
    case = only(attempts(whole, lambda p: amdahl(p, serial=serial)))
    assert case.reference == (nodes[0] * per_node, 32)
    first = 1 / (serial + (1 - serial) / (nodes[0] * per_node))
    for row in case.rows():
        truth = 1 / (serial + (1 - serial) / row["ranks"]) / first
        assert row["speedup"] == pytest.approx(truth)
        assert row["efficiency"] == pytest.approx(truth * nodes[0] * per_node / row["ranks"])


def test_perfect_weak_scaling_is_an_efficiency_of_one():
    whole = study(mode="weak", nodes=(1, 2, 4), bits=(32, 4))
    rows = only(attempts(whole, lambda p: 500.0 * p.ranks), mode="weak").rows()
    assert [r["efficiency"] for r in rows] == pytest.approx([1.0] * len(rows))


def test_bytes_and_their_ratio_are_those_of_the_wire():
    rows = rows_by_size(attempts(study(nodes=(1, 2, 4))))
    assert rows[4, 8]["wire_bytes_total"] == wire_bytes(Point(CASE, 4, 4, 8, 1))
    assert rows[4, 8]["wire_bytes_per_step"] == pytest.approx(rows[4, 8]["wire_bytes_total"] / 702)
    assert rows[4, 8]["compression_ratio"] == pytest.approx(4 / (1 + 4 / 512), rel=1e-4)
    assert rows[4, 4]["compression_ratio"] == pytest.approx(4 / (0.5 + 4 / 512), rel=1e-4)
    assert rows[1, 32]["wire_bytes_total"] == 0
    assert rows[1, 32]["compression_ratio"] is None


def test_the_communication_share_is_of_the_step_or_of_the_epochs_where_only_they_are_told():
    assert rows_by_size(attempts(study()))[2, 4]["comm_time_share"] == pytest.approx(0.25)
    metered_rows = rows_by_size(metered_attempts(study()))
    assert metered_rows[2, 4]["comm_time_share"] == pytest.approx(1.25 * 0.2)


def test_the_parts_of_a_step_add_up_and_the_exposed_share_is_one_of_them():
    for (ranks, _), row in rows_by_size(metered_attempts(study())).items():
        step_s = row["compute_s"] + row["exposed_s"] + row["data_s"]
        assert step_s == pytest.approx(128 / row["throughput"])
        assert row["exposed_share"] == pytest.approx(0.2 if ranks > 1 else 0.0)


def test_the_parts_of_a_step_add_up_over_repeats_too():
    point = Point(CASE, 2, 2, 32, 1)
    found = [
        metered(replace(point, repeat=r), speed=speed, exposed=exposed)
        for r, speed, exposed in ((1, 90.0, 0.1), (2, 100.0, 0.5), (3, 120.0, 0.3), (4, 130.0, 0.0))
    ]
    (row,) = only(found).rows()
    assert row["throughput"] == 110.0
    step_s = row["compute_s"] + row["exposed_s"] + row["data_s"]
    assert step_s == pytest.approx(128 / 100.0)  # the slower of the middle two
    assert row["exposed_share"] == pytest.approx(0.5)


def test_medians_are_taken_over_repeats_and_intervals_hold_them():
    speeds = {1: 90.0, 2: 110.0, 3: 100.0}
    whole = study(nodes=(2,), bits=(32,), repeats=3)
    (row,) = only(attempts(whole, lambda p: speeds[p.repeat])).rows()
    assert (row["throughput"], row["repeats"]) == (100, 3)
    assert row["throughput_lo"] < 90 and row["throughput_hi"] > 110
    assert (row["speedup"], row["speedup_lo"], row["speedup_hi"]) == (1, 1, 1)
    # All of one value: the same training again, which shows no noise.
    assert row["test_accuracy_lo"] is None and row["test_accuracy_hi"] is None


def test_one_repeat_has_no_interval():
    for row in only(attempts(study())).rows():
        assert all(v is None for name, v in row.items() if name.endswith(("_lo", "_hi")))


def test_without_fp32_the_reference_is_the_fewest_ranks_at_the_most_bits():
    case = only(attempts(study(nodes=(2, 4), bits=(8, 4))))
    assert case.reference == (2, 8)
    assert all(r["compression_ratio"] is None for r in case.rows())


def test_a_field_that_is_not_recorded_is_left_empty():
    point = Point(CASE, 2, 2, 32, 1)
    bare = Attempt(point, 1, "COMPLETED", 0, ({"event": "final", "images_per_s": 10.0},))
    (row,) = only([bare]).rows()
    known = {"nodes", "ranks", "bits", "repeats", "throughput", "speedup", "efficiency"}
    assert {name for name, value in row.items() if value is not None} == known
    assert tuple(row) == COLUMNS


def test_only_the_first_good_attempt_at_a_point_counts():
    point = Point(CASE, 1, 1, 32, 1)
    failed = Attempt(point, 1, "FAILED", 1, ({"event": "final", "images_per_s": 9.0},))
    found = [failed, attempt(point, speed=5.0, number=2), attempt(point, speed=7.0, number=3)]
    (row,) = only(found).rows()
    assert (row["throughput"], row["repeats"]) == (5.0, 1)


@pytest.mark.parametrize("speed", [None, 0, -1.0, True, "fast"])
def test_a_final_record_without_a_speed_is_no_measurement(speed):
    broken = attempt(Point(CASE, 1, 1, 32, 1), speed=1.0, images_per_s=speed)
    assert broken.fault
    assert analyse([broken]).cases == ()


def test_a_run_with_other_ranks_than_planned_is_no_measurement():
    alone = attempt(Point(CASE, 2, 2, 32, 1), speed=1.0, ranks=1)
    assert "planned for 2 ranks, but the script saw 1" in alone.fault


def test_rows_put_fp32_first_at_each_size_whatever_the_order_of_the_records():
    whole = study(nodes=(1, 2, 4), bits=(32, 8, 4), repeats=2)
    found = attempts(whole)
    order = [(r["ranks"], r["bits"]) for r in only(reversed(found)).rows()]
    assert order == sorted(order, key=lambda size: (size[0], -size[1]))
    assert only(reversed(found)).table.equals(only(found).table)


def test_every_case_has_its_table_in_the_order_of_the_study():
    whole = several(nodes=(1, 2), repeats=2)
    analysis = analyse(metered_attempts(whole), cases=whole.cases)
    assert [c.case for c in analysis.cases] == list(whole.cases)
    assert {c.unit for c in analysis.cases} == {"images", "words"}
    for case in analysis.cases:
        words = case.case.workload.startswith("ptb")
        assert (case.quality, case.unit) == (
            ("perplexity", "words") if words else ("test_accuracy", "images")
        )
        assert len(case.runs) == 2 * len(case.table) == 2 * 4
        assert list(case.runs.columns[:5]) == ["nodes", "ranks", "bits", "repeat", "throughput"]


def test_what_a_few_steps_have_learnt_is_not_judged():
    found = metered_attempts(study(nodes=(1, 2)))
    epoch = {"event": "epoch", "epoch": 1, "seconds": 1.0, "test_accuracy": 0.3}
    for passes, quality in ((1, ""), (2, "test_accuracy")):
        cut = [
            replace(
                a,
                records=(*[epoch] * passes, *(r for r in a.records if r["event"] != "epoch")),
                provenance={**a.provenance, "command": ["train.py", "--steps", "16"]},
            )
            for a in found
        ]
        analysis = analyse(cut)
        (case,) = analysis.cases
        assert case.quality == quality
        assert any("neither shown nor judged" in c for c in analysis.cautions) == (quality == "")


def test_one_rank_belongs_to_every_algorithm():
    whole = study(algorithms=("sra", "ring"), bits=(32, 4))
    found = metered_attempts(whole)
    assert sum(a.point.ranks == 1 for a in found) == 1
    for analysis in (analyse(found), analyse(found, cases=whole.cases)):
        assert {c.case.algorithm for c in analysis.cases} == {"sra", "ring"}
        assert all(c.reference == (1, 32) for c in analysis.cases)
        assert all(len(c.table) == 3 for c in analysis.cases)


def test_a_case_of_one_rank_alone_is_still_a_case():
    whole = study(nodes=(1,))
    assert [c.case for c in analyse(attempts(whole)).cases] == list(whole.cases)


def test_engine_records_alone_make_a_measurement_at_the_pace_of_the_slowest_rank():
    whole = study(bits=(32,), nodes=(2,))
    (point,) = plan(whole)
    analysis = analyse([engine_only(whole, point, step_s=0.1)])
    (case,) = analysis.cases
    assert case.unit == "samples"
    assert case.rows()[0]["throughput"] == pytest.approx(128 / (0.1 * 1.01))
    assert [c.split(":")[0] for c in analysis.cautions] == ["Engine counters"]
    assert case.rows()[0]["exposed_share"] == pytest.approx(0.2 / 1.005)  # of the median step


def test_runs_of_another_unit_are_left_out_and_owned_up_to():
    point = Point(CASE, 2, 2, 32, 1)
    found = [metered(replace(point, repeat=r), speed=100.0) for r in (1, 2)]
    found.append(metered(replace(point, repeat=3), speed=9.0, unit="words"))
    analysis = analyse(found)
    (row,) = analysis.cases[0].rows()
    assert (row["throughput"], row["repeats"]) == (100.0, 2)
    assert analysis.cautions[0].startswith("Mixed units: 1 measurement")


def test_the_target_is_what_fp32_reaches_at_the_largest_size_and_time_is_that_of_an_epochs_end():
    case = only(metered_attempts(study(bits=(32, 4))))
    assert case.target == pytest.approx(0.975 - 0.003)
    row = case.rows()[-1]
    assert row["time_to_target_s"] == pytest.approx(702 * 128 / row["throughput"])


def test_a_given_target_counts_the_first_epoch_that_reaches_it():
    found = metered_attempts(study(bits=(32,)))
    early, never = only(found, target=0.94), only(found, target=0.99)
    row = early.rows()[-1]
    assert row["time_to_target_s"] == pytest.approx(2 / 3 * 702 * 128 / row["throughput"])
    assert [r["time_to_target_s"] for r in never.rows()] == [None, None]
    assert only(found, target=80.0).target == pytest.approx(0.972)  # a perplexity, not this one's


def test_a_perplexity_reaches_its_target_from_above():
    found = metered_attempts(study(script=study().programs[0].script.with_name("ptb.py")))
    case = only(found)
    assert case.target == pytest.approx(100 / 0.975 * 1.01)
    assert only(found, target=106.0).rows()[0]["time_to_target_s"] == pytest.approx(
        2 / 3 * 702 * 128 / 1000
    )


def test_a_target_that_most_repeats_miss_has_no_time():
    point = Point(CASE, 2, 2, 32, 1)
    found = [metered(replace(point, repeat=r), speed=100.0) for r in (1, 2, 3)]
    missed = [replace(a, records=_worse(a.records)) for a in found]
    assert only([found[0], *missed[1:]], target=0.97).rows()[0]["time_to_target_s"] is None
    assert only([*found[:2], missed[2]], target=0.97).rows()[0]["time_to_target_s"] > 0


def test_diverged_runs_never_reach_the_target():
    point = Point(CASE, 2, 2, 32, 1)
    found = [metered(replace(point, repeat=r), speed=100.0) for r in (1, 2, 3)]
    lost = [replace(a, records=_diverged(a.records)) for a in found]
    assert only([found[0], *lost[1:]], target=0.97).rows()[0]["time_to_target_s"] is None


def _diverged(records):
    gone = {"test_accuracy": None, "nonfinite": ["test_accuracy"]}
    return tuple({**r, **gone} if r["event"] == "epoch" else r for r in records)


def _worse(records):
    return tuple({**r, "test_accuracy": 0.5} if r["event"] == "epoch" else r for r in records)


def test_curves_hold_every_epoch_in_order():
    curves = only(metered_attempts(study(repeats=2))).curves
    assert len(curves) == 4 * 2 * 3
    assert all(
        group["elapsed_s"].is_monotonic_increasing
        for _, group in curves.groupby(["ranks", "bits", "repeat"])
    )
    assert not curves["elapsed_s"].isin([math.inf]).any()


def test_the_same_records_give_the_same_bytes():
    wobble = {1: 0.97, 2: 1.0, 3: 1.02, 4: 0.99, 5: 1.01}
    whole = several(repeats=5)
    found = metered_attempts(whole, lambda p: amdahl(p) * wobble[p.repeat])
    first, again = ("".join(c.table.to_csv() for c in analyse(found).cases) for _ in range(2))
    assert first == again


def test_cases_sort_by_name_when_the_study_is_not_given():
    cases = [c.case for c in analyse(metered_attempts(several(nodes=(1,)))).cases]
    assert cases == sorted(cases) and isinstance(cases[0], Case)
