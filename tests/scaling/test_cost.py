"""What a study may cost, and what a refusal says that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.define.study import Point, plan
from qsgd_hpc.scaling.run.cost import estimate, expected_s, measured_s, refuse, spent
from qsgd_hpc.scaling.run.driver import fits, outcome_state
from tests.scaling.samples import CASE, attempt, study


def point(nodes: int, bits: int = 32, repeat: int = 1) -> Point:
    return Point(CASE, nodes, nodes, bits, repeat)


def test_before_anything_is_measured_each_job_may_use_its_walltime():
    whole = study(nodes=(1, 4), bits=(32, 4))
    coming = estimate(whole, plan(whole), {}, 30)
    assert (coming.node_hours, coming.jobs, coming.bound) == ((1 + 4 + 4) * 0.5, 3, True)
    assert estimate(whole, plan(whole), {}, None).node_hours is None


def test_a_packed_job_holds_the_largest_size_for_all_its_points():
    whole = study(nodes=(1, 4), bits=(32, 4), pack=True)
    first = estimate(whole, plan(whole), {}, 30)
    assert first.node_hours == 4 * 0.5
    assert "a job of at most 2 node-hours" in first.sentence and "others follow" in first.sentence
    times = {p: 60.0 for p in plan(whole)}
    known = estimate(whole, plan(whole), times, 30)
    assert (known.node_hours, known.jobs, known.bound) == (pytest.approx(4 * 3 / 60), 1, False)
    assert estimate(whole, plan(whole), times, 2).jobs == 2
    small = [p for p in plan(whole) if p.nodes == 1]
    assert estimate(whole, small, times, 30).node_hours == pytest.approx(1 / 60)


def test_measured_times_tell_of_like_points_first():
    times = {point(1): 80.0, point(2): 50.0, point(2, 4): 30.0}
    assert expected_s(point(2, 4, repeat=2), times, "strong") == 30.0
    assert expected_s(point(2, 8), times, "strong") == 50.0
    assert expected_s(point(4), times, "weak") == 80.0
    assert expected_s(point(1), {point(4): 20.0}, "strong") == 80.0
    other = replace(point(1), case=replace(CASE, workload="other"))
    assert expected_s(other, times, "strong") is None


def test_time_spent_counts_the_nodes_held_and_failed_attempts():
    good = attempt(point(1), speed=1.0)
    held = {**good.provenance, "seconds": 1800.0, "held_nodes": 4}
    packed = replace(good, provenance=held)
    failed = replace(good, state="FAILED", provenance={**good.provenance, "seconds": 3600.0})
    assert spent([packed, failed]) == pytest.approx(2.0 + 1.0)
    assert measured_s([packed, failed]) == {point(1): 1800.0}


def test_a_study_over_its_cap_is_refused_with_what_fits():
    whole = study(nodes=(1, 2, 8), bits=(32, 4), repeats=3, max_node_hours=10)
    with pytest.raises(UsageError) as caught:
        refuse(whole, plan(whole), {}, 0.0, 60)
    text = str(caught.value)
    assert "15 points" in text and "63 node-hours" in text
    assert "--walltime 9m, or --nodes 1,2, or --pack" not in text  # packed: 8 nodes for an hour
    for way in ("--walltime 9m", "--pack"):
        assert way in text
    refuse(replace(whole, max_node_hours=63), plan(whole), {}, 0.0, 60)
    refuse(replace(whole, max_node_hours=None), plan(whole), {}, 0.0, None)
    refuse(whole, [], {}, 11.0, 60)  # a finished study costs nothing more


def test_what_was_spent_already_counts_and_a_cap_needs_a_walltime():
    whole = study(nodes=(1, 2), bits=(32,), max_node_hours=3)
    refuse(whole, plan(whole), {}, 0.0, 60)
    with pytest.raises(UsageError, match=r"after 0\.5 node-hours already spent"):
        refuse(whole, plan(whole), {}, 0.5, 60)
    with pytest.raises(UsageError, match="give --walltime"):
        refuse(whole, plan(whole), {}, 0.0, None)


def test_a_point_is_begun_only_if_it_should_end_in_time():
    times = {point(1): 100.0}
    assert fits(point(1), times, "weak", 116.0)
    assert not fits(point(1), times, "weak", 114.0)
    assert fits(point(1), {}, "weak", 1.0)
    assert fits(point(1), times, "weak", None)


def test_a_point_that_its_job_cut_off_ended_as_the_job_did():
    failed = {"state": "FAILED", "exit_code": 143}
    good = {"state": "COMPLETED", "exit_code": 0}
    assert outcome_state(None, "TIMEOUT", is_last=True) == ("TIMEOUT", None)
    assert outcome_state(failed, "TIMEOUT", is_last=True) == ("TIMEOUT", 143)
    assert outcome_state(failed, "TIMEOUT", is_last=False) == ("FAILED", 143)
    assert outcome_state(failed, "COMPLETED", is_last=True) == ("FAILED", 143)
    assert outcome_state(good, "TIMEOUT", is_last=True) == ("COMPLETED", 0)
    assert outcome_state(None, "FAILED", is_last=True) == ("LOST", None)
