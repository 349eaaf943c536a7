"""The "engine" record: from an engine's figures to the fields of one line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.recording import engine_record
from tests.engine.ranks import on_ranks

STATS = {"wire_bytes": 900, "gradient_bytes": 4000, "comm_time_s": 1.5, "fused_reductions": 60}


def profile_of(step_s, *, steps=None, wait_s=0.002, comm_s=0.005, waits_seen=True):
    """Return a profile of steps that took so long; each waited and communicated alike."""
    kept = len(step_s)
    return {
        "steps": kept + 1 if steps is None else steps,
        "step_s": np.array(step_s, float),
        "wait_s": np.full(kept, wait_s),
        "comm_s": np.full(kept, comm_s),
        "coding_s": np.full(kept, 0.001),
        "layers": [("head", 10, 0.0), ("body", 300, 0.25)],
        "waits_seen": waits_seen,
    }


def summary(profile, quality=None, rank=0, ranks=2):
    return engine_record.summary(profile, STATS, quality or {}, rank=rank, ranks=ranks)


def test_the_first_ten_steps_are_not_timed():
    fields = summary(profile_of([9.0] * 10 + [0.1] * 19 + [0.3]))
    assert (fields["steps"], fields["warmup_steps"]) == (31, 10)
    assert fields["step_s"] == pytest.approx(0.1)
    assert fields["step_mean_s"] == pytest.approx((19 * 0.1 + 0.3) / 20)


def test_the_first_half_of_a_short_run_is_not_timed():
    fields = summary(profile_of([9.0] * 4 + [0.1] * 4))
    assert (fields["steps"], fields["warmup_steps"]) == (9, 4)
    assert fields["step_mean_s"] == pytest.approx(0.1)


def test_steps_that_a_long_run_has_forgotten_were_its_warm_up():
    assert summary(profile_of([0.1] * 50, steps=70_000))["step_mean_s"] == pytest.approx(0.1)
    fields = summary(profile_of([9.0] * 2 + [0.1] * 50, steps=61))  # steps 9 and 10 are still there
    assert fields["step_mean_s"] == pytest.approx(0.1)


@pytest.mark.parametrize("steps", [1, 2])
def test_too_few_steps_have_no_times(steps):
    fields = summary(profile_of([0.1] * (steps - 1)))
    assert fields["steps"] == steps
    assert fields["step_s"] is None
    assert fields["exposed_s"] is None


def test_what_is_not_waited_for_is_hidden():
    fields = summary(profile_of([0.1] * 30))
    assert fields["exposed_s"] == pytest.approx(0.002)
    assert fields["hidden_s"] == pytest.approx(0.003)
    assert summary(profile_of([0.1] * 30, wait_s=0.009))["hidden_s"] == 0


def test_nobody_knows_what_a_framework_waits_by_itself():
    fields = summary(profile_of([0.1] * 30, waits_seen=False))
    assert fields["comm_s"] == pytest.approx(0.005)
    assert fields["exposed_s"] is None
    assert fields["hidden_s"] is None


def test_a_single_rank_waits_for_nobody():
    fields = summary(profile_of([0.1] * 30, wait_s=0.004), ranks=1)
    assert (fields["exposed_s"], fields["hidden_s"]) == (0, 0)


def test_the_error_is_the_mean_over_compressed_reductions():
    def quality(coding, mean_nmse, reductions):
        return {"coding": coding, "mean_nmse": mean_nmse, "reductions": reductions}

    found = {
        "a": quality("qsgd", 0.1, 30),
        "b": quality("qsgd", 0.5, 10),
        "c": quality("none", 0, 9),
    }
    assert summary(profile_of([0.1] * 30), found)["nmse"] == pytest.approx(0.2)
    assert summary(profile_of([0.1] * 30), {"c": found["c"]})["nmse"] is None


def test_what_was_asked_to_be_coded_and_travels_as_float32_is_counted():
    def quality(coding, mean_nmse, elements, reductions=20):
        told = {"coding": coding, "mean_nmse": mean_nmse, "elements": elements}
        return {**told, "reductions": reductions}

    found = {
        "coded": quality("qsgd(bits=4)", 0.03, 5000),
        "declined": quality("none", 0.0, 300),
        "raised": quality("none", 0.2, 40),  # coded at first, until its error was over the budget
        "unused": quality("none", 0.0, 7, reductions=0),
    }
    counted = engine_record.uncoded(found, planner=True)
    assert counted == {
        "asked_tensors": 3,
        "plain_tensors": 2,
        "declined_tensors": 1,
        "asked_elements": 5340,
        "plain_elements": 340,
    }
    assert engine_record.uncoded(found, planner=False) == {**counted, "declined_tensors": 0}
    assert set(engine_record.uncoded({}, planner=True).values()) == {0}


def test_rank_0_alone_lists_the_layers():
    fields = summary(profile_of([0.1] * 30))
    assert fields["layers"] == [[10, 0.0], [300, 0.25]]
    assert fields["backward_s"] == 0.25
    assert not {"layers", "backward_s"} & set(summary(profile_of([0.1] * 30), rank=1))


def test_a_single_rank_whose_gradients_pass_no_engine_tells_no_layers_and_no_bytes():
    marked = {**profile_of([0.1] * 30), "layers": [("allreduce.qsgd_hpc.step.gradient.b", 10, 0.0)]}
    fields = summary(marked, ranks=1)
    assert fields["step_s"] == pytest.approx(0.1)
    assert (fields["gradient_bytes"], fields["fused_reductions"]) == (None, None)
    assert not {"layers", "backward_s"} & set(fields)


@pytest.mark.parametrize("count", [1, 2000, 2001, 4000, 9001])
def test_many_layers_are_merged_with_their_neighbours(count):
    layers = [(i + 1, i / 10) for i in range(count)]
    merged = engine_record.merge_neighbours(layers)
    assert len(merged) <= engine_record.MOST_LAYERS
    assert (len(merged) == count) == (count <= engine_record.MOST_LAYERS)
    assert sum(elements for elements, _ in merged) == sum(elements for elements, _ in layers)
    assert merged[-1][1] == layers[-1][1]


def leave_after(steps, coding=None, **config):
    """Have two ranks reduce so often, then leave their records."""

    def program(me):
        for _ in range(steps):
            me.allreduce("w", np.ones(10, np.float32), "sum", coding).wait()
        engine_record.write_record(me.engine, rank=me.rank, ranks=2)

    assert on_ranks(2, program, **config) == [None, None]


def test_each_rank_appends_one_line(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    monkeypatch.setenv("QSGD_RECORDS", str(path))
    leave_after(6)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted((r["event"], r["rank"], r["steps"]) for r in found) == [
        ("engine", 0, 6),
        ("engine", 1, 6),
    ]


@pytest.mark.parametrize(("tuner", "declined"), [("off", 1), ("on", 0)])
def test_what_the_planner_declines_is_in_the_record(tmp_path, monkeypatch, tuner, declined):
    """A tensor of one bucket: the latency of its messages is all that it costs."""
    path = tmp_path / "records.jsonl"
    for name, value in (("RECORDS", str(path)), ("PLANNER", "on"), ("AUTOTUNE", tuner)):
        monkeypatch.setenv(f"QSGD_{name}", value)
    spec = _core.CodecSpec(bits=4)
    machine = _core.Machine(ranks=2, across=(50e-6, 1e-9), codecs=[(spec, 1e-9, 1e-9, 1e-9)])
    leave_after(4, spec, planner="on", machine=machine, log=lambda text: None)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    names = ("asked_tensors", "plain_tensors", "declined_tensors", "plain_elements")
    assert [[r[name] for name in names] for r in found] == [[1, 1, declined, 10]] * 2


def test_without_a_step_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("QSGD_RECORDS", str(tmp_path / "records.jsonl"))
    leave_after(0)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_is_one_line_and_no_exception(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("QSGD_RECORDS", str(tmp_path / "nowhere" / "records.jsonl"))
    leave_after(3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("no 'engine' record" in line and "unset" in line for line in lines)
