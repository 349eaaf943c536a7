"""Where a timeline says that the time of training steps went."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from qsgd_hpc import _core
from qsgd_hpc.timeline.cli import timeline as verbs
from qsgd_hpc.timeline.traces import OTHERS, of_steps
from tests.timeline.test_timeline import traced

PROGRAM, STEPS, TENSOR = 1, 3, 4


def span(rank, name, tid, begin, end, **args):
    return {
        "ph": "X", "name": name, "pid": rank, "tid": tid, "ts": begin, "dur": end - begin,
        "args": args,
    }  # fmt: skip


def negotiation(rank, tid, begin, end, *arrivals):
    edge = {"name": "NEGOTIATE_ALLREDUCE", "pid": rank, "tid": tid}
    marks = [
        {"ph": "i", "name": f"rank {who}", "pid": rank, "tid": tid, "ts": ts, "args": {"rank": who}}
        for who, ts in arrivals
    ]
    return [{"ph": "B", "ts": begin, **edge}, *marks, {"ph": "E", "ts": end, **edge}]


def named(rank, *tensors):
    rows = {PROGRAM: "program", STEPS: "steps", **dict(enumerate(tensors, TENSOR))}
    return [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}}
        for tid, name in rows.items()
    ]


def work(rank, tid, begin, end, **more):
    return span(rank, "ALLREDUCE", tid, begin, end, wire_bytes=1, elements=1, bits=4, **more)


# Rank 0 hands over at 0 and waits from 20 on; rank 1 comes at 50, and does not wait before 60.
RANK_0 = [
    *named(0, "w"),
    span(0, "STEP", STEPS, 0, 100, step=1),
    *negotiation(0, TENSOR, 0, 55, (0, 1), (1, 52)),
    span(0, "WAIT", PROGRAM, 20, 90),
    work(0, TENSOR, 57, 87, coding_us=12),
]
RANK_1 = [
    *named(1, "w"),
    span(1, "STEP", STEPS, 50, 150, step=1),
    *negotiation(1, TENSOR, 50, 56, (1, 50)),
    span(1, "WAIT", PROGRAM, 70, 90),
    work(1, TENSOR, 58, 88, coding_us=10),
]


def test_a_steps_time_has_four_parts():
    first, second = of_steps(RANK_0 + RANK_1)
    assert (first.rank, first.steps_us, first.computing_us) == (0, 100, 30)
    assert dict(first.absent_us) == {1: 35}
    assert (first.exposed_us, first.agreeing_us) == (30, 5)  # 55 to 57 and 87 to 90
    assert (first.hidden_us, first.coding_us) == (0, 12)
    assert (second.computing_us, second.exposed_us, second.agreeing_us) == (80, 18, 2)
    assert dict(second.absent_us) == {}
    assert (second.hidden_us, second.coding_us) == (12, 10)


def test_without_rank_0_nobody_knows_who_came_last():
    late = [e for e in RANK_0 if e["ph"] != "i"]
    as_rank_2 = [{**event, "pid": 2} for event in late]
    (alone,) = of_steps(as_rank_2)
    assert dict(alone.absent_us) == {OTHERS: 35}
    both = of_steps(RANK_0 + as_rank_2)
    assert dict(both[1].absent_us) == {1: 35}  # rank 0's part tells


def test_what_lies_outside_of_steps_does_not_count():
    later = [
        *RANK_0,
        *negotiation(0, TENSOR, 200, 300, (0, 201), (1, 299)),
        span(0, "WAIT", PROGRAM, 200, 400),
        work(0, TENSOR, 300, 390),
    ]
    before, after = of_steps(RANK_0), of_steps(later)
    assert before == after


edges = st.lists(st.integers(0, 1000), min_size=0, max_size=12).map(sorted)


def spans_between(points):
    return list(zip(points[::2], points[1::2], strict=False))


@given(edges, edges, edges, edges)
def test_the_parts_add_up(steps, waits, works, negotiations):
    events = named(0, "w", "v")
    events += [
        span(0, "STEP", STEPS, a, b, step=i) for i, (a, b) in enumerate(spans_between(steps))
    ]
    events += [span(0, "WAIT", PROGRAM, a, b) for a, b in spans_between(waits)]
    events += [work(0, TENSOR, a, b, coding_us=(b - a) / 2) for a, b in spans_between(works)]
    for a, b in spans_between(negotiations):
        events += negotiation(0, TENSOR + 1, a, b, (0, a), (1, b))
    for rank in of_steps(events):
        parts = rank.computing_us, rank.exposed_us, rank.agreeing_us, *rank.absent_us.values()
        assert all(part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(rank.steps_us)
        assert rank.hidden_us <= rank.computing_us
        assert rank.coding_us <= (rank.hidden_us + rank.exposed_us) / 2 + 1e-9


def test_the_engine_marks_steps_and_the_late_rank_is_blamed(tmp_path):
    def program(me):
        x = np.random.default_rng(me.rank).standard_normal(20_000).astype(np.float32)
        for _ in range(6):
            time.sleep(0.05 * me.rank)
            handles = [me.allreduce(n, x, coding=_core.CodecSpec(bits=4)) for n in ("a", "b")]
            for handle in handles:
                handle.wait()

    first, second = of_steps([e for events in traced(tmp_path, program) for e in events])
    assert len(first.durations_us) == len(second.durations_us) == 5
    assert first.absent_us[1] > 0.5 * first.steps_us  # of 50 ms, whatever else runs here
    assert second.absent_us[0] < 0.5 * second.steps_us
    assert min(rank.coding_us for rank in (first, second)) > 0


def test_a_file_is_shown_with_and_without_the_verb(tmp_path):
    file = tmp_path / "t.json"
    file.write_text(json.dumps(RANK_0 + RANK_1))
    shown, also = (CliRunner().invoke(verbs, args) for args in (["show", str(file)], [str(file)]))
    assert shown.exit_code == 0, shown.output
    assert shown.output == also.output
    lines = shown.output.splitlines()
    assert lines[0].startswith("one step of 0.1 ms")
    assert lines[2].split("  ")[0].strip() == "0"
    assert "rank 1: 0.035 (35%)" in lines[2]
    missing = CliRunner().invoke(verbs, [str(tmp_path / "none.json")])
    assert missing.exit_code == 2
    assert "does not exist" in missing.output


def test_a_timeline_without_whole_steps_shows_its_tensors(tmp_path):
    file = tmp_path / "t.json"
    file.write_text(json.dumps([e for e in RANK_0 if e["name"] != "STEP"]))
    shown = CliRunner().invoke(verbs, [str(file)])
    assert shown.exit_code == 0
    assert shown.output.startswith("tensor")
