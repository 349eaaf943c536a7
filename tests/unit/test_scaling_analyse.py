"""The table of a study recovers the truth of synthetic data."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsgd_hpc.scaling.analyse import COLUMNS, analyse
from qsgd_hpc.scaling.attempts import Attempt
from qsgd_hpc.scaling.plan import Point, plan
from tests.unit.scaling_samples import amdahl, attempt, attempts, study, wire_bytes


def rows_by_size(found):
    return {(r["ranks"], r["bits"]): r for r in analyse(found).rows()}


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
    analysis = analyse(attempts(whole, lambda p: amdahl(p, serial=serial)))
    assert analysis.reference == (nodes[0] * per_node, 32)
    first = 1 / (serial + (1 - serial) / (nodes[0] * per_node))
    for row in analysis.rows():
        truth = 1 / (serial + (1 - serial) / row["ranks"]) / first
        assert row["speedup"] == pytest.approx(truth)
        assert row["efficiency"] == pytest.approx(truth * nodes[0] * per_node / row["ranks"])


def test_perfect_weak_scaling_is_an_efficiency_of_one():
    whole = study(mode="weak", nodes=(1, 2, 4), bits=(32, 4))
    rows = analyse(attempts(whole, lambda p: 500.0 * p.ranks)).rows()
    assert [r["efficiency"] for r in rows] == pytest.approx([1.0] * len(rows))


def test_bytes_and_their_ratio_are_those_of_the_wire():
    rows = rows_by_size(attempts(study(nodes=(1, 2, 4))))
    assert rows[4, 8]["wire_bytes_total"] == wire_bytes(Point(4, 4, 8, 1))
    assert rows[4, 8]["wire_bytes_per_step"] == pytest.approx(rows[4, 8]["wire_bytes_total"] / 702)
    assert rows[4, 8]["compression_ratio"] == pytest.approx(4 / (1 + 4 / 512), rel=1e-4)
    assert rows[4, 4]["compression_ratio"] == pytest.approx(4 / (0.5 + 4 / 512), rel=1e-4)
    assert rows[1, 32]["wire_bytes_total"] == 0
    assert rows[1, 32]["compression_ratio"] is None


def test_the_communication_share_is_of_the_epochs_time():
    rows = rows_by_size(attempts(study()))
    assert rows[2, 4]["comm_time_share"] == pytest.approx(0.25)


def test_medians_and_ranges_are_taken_over_repeats():
    speeds = {1: 90.0, 2: 110.0, 3: 100.0}
    whole = study(nodes=(2,), bits=(32,), repeats=3)
    (row,) = analyse(attempts(whole, lambda p: speeds[p.repeat])).rows()
    assert (row["images_per_s"], row["images_per_s_min"], row["images_per_s_max"]) == (100, 90, 110)
    assert row["repeats"] == 3


def test_without_fp32_the_reference_is_the_fewest_ranks_at_the_most_bits():
    analysis = analyse(attempts(study(nodes=(2, 4), bits=(8, 4))))
    assert analysis.reference == (2, 8)
    assert all(r["compression_ratio"] is None for r in analysis.rows())


def test_a_field_that_is_not_recorded_is_left_empty():
    point = Point(2, 2, 32, 1)
    bare = Attempt(point, 1, "COMPLETED", 0, ({"event": "final", "images_per_s": 10.0},))
    (row,) = analyse([bare]).rows()
    assert row["images_per_s"] == 10.0
    for name in ("test_accuracy", "wire_bytes_total", "wire_bytes_per_step", "comm_time_share"):
        assert row[name] is None
    assert tuple(row) == COLUMNS


def test_only_the_first_good_attempt_at_a_point_counts():
    point = Point(1, 1, 32, 1)
    failed = Attempt(point, 1, "FAILED", 1, ({"event": "final", "images_per_s": 9.0},))
    found = [failed, attempt(point, speed=5.0, number=2), attempt(point, speed=7.0, number=3)]
    (row,) = analyse(found).rows()
    assert (row["images_per_s"], row["repeats"]) == (5.0, 1)


@pytest.mark.parametrize("speed", [None, 0, -1.0, True, "fast"])
def test_a_final_record_without_a_speed_is_no_measurement(speed):
    broken = attempt(Point(1, 1, 32, 1), speed=1.0, images_per_s=speed)
    assert "images_per_s" in broken.fault
    assert analyse([broken]) is None


def test_a_run_with_other_ranks_than_planned_is_no_measurement():
    alone = attempt(Point(2, 2, 32, 1), speed=1.0, ranks=1)
    assert "planned for 2 ranks, but the script saw 1" in alone.fault


def test_rows_put_fp32_first_at_each_size():
    found = attempts(study(nodes=(1, 2, 4), bits=(32, 8, 4)))
    order = [(r["ranks"], r["bits"]) for r in analyse(reversed(found)).rows()]
    assert order == sorted(order, key=lambda size: (size[0], -size[1]))
    assert len(order) == len(plan(study(nodes=(1, 2, 4))))
