"""A measurement of what the engine wrote, where the script itself wrote nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from qsgd_hpc.scaling.define.study import Point, counts_for, global_batch, plan
from qsgd_hpc.scaling.store import Attempt, parse_attempts, throughput
from tests.scaling.samples import CASE, study


def engine(rank: int, ranks: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "event": "engine",
        "rank": rank,
        "ranks": ranks,
        "steps": 40,
        "warmup_steps": 10,
        "step_s": 0.1 + 0.1 * rank,
        "step_mean_s": 0.5,  # a test between epochs is part of a step
        "exposed_s": 0.01 * rank,
        "wire_bytes": 1000,
        "gradient_bytes": 4000,
        "nmse": None,
        "layers": [[10, 0.0]],
        "backward_s": 0.05,
        "host": f"n{rank}",
        **changes,
    }


def run(*records: dict[str, Any], batch: int | None = 128) -> Attempt:
    return Attempt(Point(CASE, 2, 2, 4, 1), 1, "COMPLETED", 0, records, global_batch=batch)


def test_the_slowest_rank_sets_the_pace_of_a_script_without_a_final_record():
    found = run(engine(0), engine(1))
    assert found.fault is None
    assert throughput(found.final) == (pytest.approx(128 / 0.2), "samples")
    assert found.final["source"] == "engine"
    assert found.final["ranks"] == 2 and found.final["hosts"] == ["n0", "n1"]
    assert found.final["exposed_s"] == pytest.approx(0.005)
    assert (found.final["wire_bytes"], found.final["nmse"]) == (2000, None)
    assert "data_s" not in found.final and "test_accuracy" not in found.final


def test_without_a_batch_steps_are_counted():
    assert throughput(run(engine(0), engine(1), batch=None).final) == (pytest.approx(5), "steps")


@pytest.mark.parametrize(
    "records",
    [[], [engine(0)], [engine(1)], [engine(0), engine(1, step_s=None)]],
    ids=["none", "no rank 1", "no rank 0", "no timed step"],
)
def test_a_rank_without_a_record_makes_no_measurement(records):
    assert run(*records).silent


def test_steps_of_a_meter_without_a_batch_are_counted_in_samples():
    own = {"event": "final", "throughput": 5.0, "unit": "steps"}
    assert throughput(run(own).final) == (pytest.approx(5 * 128), "samples")
    assert throughput(run(own, batch=None).final) == (5.0, "steps")


def test_a_scripts_own_final_record_wins_and_a_wrong_number_of_ranks_is_seen():
    own = {"event": "final", "throughput": 7.0, "unit": "words"}
    assert throughput(run(engine(0), engine(1), own).final) == (7.0, "words")
    assert "planned for 2 ranks, but the script saw 1" in str(run(engine(0, ranks=1)).fault)


def test_the_batch_is_kept_with_the_attempt():
    found = run(engine(0), engine(1))
    assert parse_attempts(found.to_line().decode()) == ([found], [])
    assert global_batch("weak", CASE, 2) == 256


@pytest.mark.parametrize(
    "changed",
    [
        {"records": ["x"]},
        {"records": [{"event": "final", "place": "text"}]},
        {"provenance": None},
        {"point": 1},
        {"format": 99},
    ],
)
def test_a_line_that_is_no_attempt_is_skipped_and_numbered(changed):
    sound = run(engine(0), engine(1)).to_line().decode()
    edited = json.dumps({**json.loads(sound), **changed})
    found, unreadable = parse_attempts(f"{edited}\n{sound}")
    assert (len(found), unreadable) == (1, [1])


@pytest.mark.parametrize(
    "speed", [10**400, float("inf"), float("nan"), "fast", True, -1, 1e300, None]
)
def test_a_throughput_that_is_no_number_is_a_fault(speed):
    final = {"event": "final", "ranks": 2, "throughput": speed}
    assert "expected a number above 0" in (run(final).fault or "")


def test_a_negative_time_is_a_fault():
    final = {"event": "final", "ranks": 2, "throughput": 7.0, "step_s": -1.0}
    assert "step_s -1.0; expected seconds from 0 on" in (run(final).fault or "")


def test_one_rank_is_measured_under_one_algorithm_and_counts_for_all():
    whole = study(algorithms=("ring", "auto"), nodes=(1, 2), bits=(32, 4))
    points = plan(whole)
    assert len(points) == 1 + 2 * 2
    (alone,) = [p for p in points if p.ranks == 1]
    assert all(counts_for(case, alone) for case in whole.cases)
    assert not counts_for(replace(CASE, batch_size=64), alone)
    two = next(p for p in points if p.ranks == 2)
    assert [counts_for(case, two) for case in whole.cases].count(True) == 1
