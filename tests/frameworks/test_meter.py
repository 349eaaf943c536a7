"""Meter: its parts add up, its raw numbers are kept, and no odd training upsets it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qsgd_hpc.frameworks.meter import COUNTERS, StepLog, Waits, breakdown, mean_over_ranks
from tests.processes import without_settings

# One process for all of them: MPI starts once in a process, and not in that of the tests.
TRAININGS = """
import itertools, json, math, os, time
import numpy as np
import qsgd_hpc.arrays as hvd
from qsgd_hpc.scaling import Meter

hvd.init()
told = {}

def train(name, steps_of_epochs, loader=range, **about):
    os.environ["QSGD_RECORDS"] = f"{name}.jsonl"
    about |= {"dataset": "made up", "test_samples": 40}
    meter = Meter(hvd, global_batch_size=8, unit="images", **about)
    epochs = []
    for steps in steps_of_epochs:
        for _ in meter.steps(loader(steps)):
            hvd.allreduce(np.ones(3000, np.float32), name="gradient")
        epochs.append(meter.epoch(train_loss=np.float32(0.5), test_accuracy=0.75))
    told[name] = {"epochs": epochs, "final": meter.final(parameters=7)}
    return meter

def slow(steps):
    for i in range(steps):
        time.sleep(0.002)
        yield i

def breaks(steps):
    yield from range(steps)
    raise OSError("the disk is gone")

train("plain", [25, 5], slow)
train("short", [3])
train("single", [1])
train("empty", [0])
train("never", [])
train("words", [4], units_per_sample=35)

os.environ["QSGD_RECORDS"] = "faulty.jsonl"
meter = Meter(hvd)
try:
    for _ in meter.steps(breaks(6)):
        pass
except OSError as error:
    told["fault"] = str(error)
told["faulty"] = {"final": meter.final()}

os.environ["QSGD_RECORDS"] = "left.jsonl"
meter = Meter(hvd)
for i in meter.steps(itertools.count()):
    if i == 5:
        break
told["left"] = {"epochs": [meter.epoch(train_loss=math.nan)], "final": meter.final()}

del os.environ["QSGD_RECORDS"]
meter = Meter(hvd)
for _ in meter.steps(range(200)):
    pass
told["unrecorded"] = {"final": meter.final(test_accuracy=0.5)}
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meter")
    environ = without_settings()
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", TRAININGS]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder / "told.json").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return found


def records(folder: Path, name: str, event: str) -> list[dict[str, Any]]:
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["event"] == event]


def log_of(*steps: tuple[float, float, float]) -> StepLog:
    """Return a log of (seconds, data, waiting) per step."""
    log, before = StepLog(), dict.fromkeys(COUNTERS.values(), 0.0)
    for step_s, data_s, wait_s in steps:
        after = {**before, "wait_time_s": wait_s, "comm_time_s": 0.5, "coding_time_s": 0.125}
        log.add(step_s, data_s, before, after)
    return log


def test_what_waits_do_not_explain_is_computing() -> None:
    log = log_of((9.0, 9.0, 0.0), (2.0, 0.25, 0.25), (4.0, 0.5, 1.5), (3.0, 0.0, 0.5))
    parts = breakdown(log, Waits(2))
    assert parts["step_mean_s"] == 3.5 and parts["step_s"] == 3.5
    assert parts["data_s"] == 0.25 and parts["exposed_s"] == 1.0 and parts["compute_s"] == 2.25
    assert parts["coding_s"] == 0.125 and parts["comm_s"] == 0.5
    assert parts["hidden_s"] == 0.0  # it waited longer than it communicated: for another rank
    assert parts["step_jitter"] == pytest.approx(statistics.stdev([2.0, 2.5]) / 2.25)


def test_a_single_rank_has_no_exposed_and_no_hidden_communication() -> None:
    parts = breakdown(log_of((1.0, 0.25, 0.5), (1.0, 0.25, 0.5)), Waits(1, compute_s=[0.1]))
    assert (parts["exposed_s"], parts["hidden_s"], parts["compute_s"]) == (0.0, 0.0, 0.75)


@pytest.mark.parametrize(("alone", "exposed"), [([1.0, 2.0], 1.5), ([3.0], 0.0), ([9.0], 0.0)])
def test_a_measured_step_without_communication_tells_what_is_exposed(
    alone: list[float], exposed: float
) -> None:
    """A step on its own may seem longer than one of the training; exposed is not negative then."""
    parts = breakdown(log_of((3.5, 0.5, 0.0), (3.5, 0.5, 0.0)), Waits(2, False, alone))
    assert parts["exposed_s"] == exposed
    assert parts["compute_s"] + parts["exposed_s"] + parts["data_s"] == parts["step_mean_s"]


def test_where_nobody_sees_the_waits_the_parts_are_unknown_and_the_step_is_not() -> None:
    log = log_of((3.5, 0.5, 0.0), (3.5, 0.5, 0.0))
    parts = breakdown(log, Waits(2, seen=False))
    assert (parts["step_mean_s"], parts["data_s"], parts["comm_s"]) == (3.5, 0.5, 0.5)
    assert parts["compute_s"] is parts["exposed_s"] is parts["hidden_s"] is None
    assert Waits(2, seen=False).raw(log, 0)["exposed_s"] is None


def test_a_single_step_may_take_less_than_the_mean_of_those_without_communication() -> None:
    waits = Waits(2, False, [2.0, 4.0])
    log = log_of((3.0, 0.5, 0.0), (5.0, 0.5, 0.0))
    assert waits.raw(log, 0)["exposed_s"] == [-0.5, 1.5]
    assert waits.raw(log, 1) == {
        "seconds": [5.0], "data_s": [0.5], "comm_s": [0.5], "coding_s": [0.125],
        "exposed_s": [1.5],
    }  # fmt: skip


def test_a_rank_without_a_number_does_not_count_in_its_mean() -> None:
    rows = [{"a": 1.0, "b": None}, {"a": 2.0, "b": None}, {"c": 5}]
    assert mean_over_ranks(rows) == {"a": 1.5, "b": None, "c": 5.0}


def test_the_records_hold_every_step_and_what_is_told(folder: Path, told: dict[str, Any]) -> None:
    first, second = records(folder, "plain", "steps")
    assert (first["first_step"], second["first_step"]) == (0, 25)
    for name in ("seconds", "data_s", "exposed_s", "comm_s", "coding_s"):
        assert (len(first[name]), len(second[name])) == (25, 5)
    assert min(first["data_s"]) >= 0.002
    (final,) = records(folder, "plain", "final")
    assert final.items() >= told["plain"]["final"].items()
    timed = first["seconds"][10:] + second["seconds"]
    assert final["step_mean_s"] == pytest.approx(statistics.fmean(timed), rel=1e-4)
    assert final["step_s"] == pytest.approx(statistics.median(timed), rel=1e-4)
    assert final["throughput"] == pytest.approx(8 / final["step_mean_s"])


def test_an_epoch_tells_its_speed_and_the_time_since_the_first_step(
    folder: Path, told: dict[str, Any]
) -> None:
    one, two = records(folder, "plain", "epoch")
    raw = records(folder, "plain", "steps")[1]["seconds"]
    assert (one["epoch"], two["epoch"]) == (1, 2) and two["unit"] == "images"
    assert two["seconds"] == pytest.approx(sum(raw), rel=1e-4)
    assert two["elapsed_s"] == pytest.approx(one["seconds"] + two["seconds"])
    assert two["throughput"] == pytest.approx(5 * 8 / two["seconds"])
    assert (two["train_loss"], two["test_accuracy"]) == (0.5, 0.75)


@pytest.mark.parametrize("name", ["plain", "short", "single", "words", "faulty", "left"])
def test_computing_waiting_and_data_add_up_to_the_step(told: dict[str, Any], name: str) -> None:
    final = told[name]["final"]
    parts = final["compute_s"] + final["exposed_s"] + final["data_s"]
    assert parts == pytest.approx(final["step_mean_s"])
    assert final["exposed_s"] == final["hidden_s"] == final["wire_bytes"] == 0  # of one rank
    assert final["compute_s"] > 0


def test_the_final_record_names_what_was_trained_and_where(told: dict[str, Any]) -> None:
    final = told["plain"]["final"]
    assert (final["dataset"], final["test_samples"]) == ("made up", 40)
    assert (final["ranks"], final["steps"], final["warmup_steps"]) == (1, 30, 10)
    assert (final["global_batch_size"], final["dataset"], final["parameters"]) == (8, "made up", 7)
    assert (final["bits"], final["algorithm"], final["nmse"]) == (32, "auto", None)
    assert (final["train_loss"], final["test_accuracy"]) == (0.5, 0.75)  # of the last epoch
    assert len(final["hosts"]) == 1 and final["threads"] >= 1 and "first 10" in final["warmup_rule"]


def test_words_count_as_often_as_a_sample_has_them(told: dict[str, Any]) -> None:
    final = told["words"]["final"]
    assert final["throughput"] == pytest.approx(8 * 35 / final["step_mean_s"])


@pytest.mark.parametrize("name", ["empty", "never"])
def test_a_training_without_a_step_has_no_speed_and_no_parts(
    told: dict[str, Any], name: str
) -> None:
    final = told[name]["final"]
    assert final["steps"] == final["warmup_steps"] == 0
    assert final["throughput"] is final["step_mean_s"] is final["compute_s"] is None
    if name == "empty":
        (epoch,) = told[name]["epochs"]
        assert epoch["throughput"] is None and epoch["seconds"] == 0


def test_a_loader_that_raises_is_heard_and_its_whole_steps_are_kept(
    folder: Path, told: dict[str, Any]
) -> None:
    assert told["fault"] == "the disk is gone"
    assert told["faulty"]["final"]["steps"] == 6
    (raw,) = records(folder, "faulty", "steps")
    assert len(raw["seconds"]) == 6 and records(folder, "faulty", "epoch") == []
    assert told["faulty"]["final"]["unit"] == "steps"  # no batch size was given


def test_a_loop_that_is_left_does_not_count_its_last_step(told: dict[str, Any]) -> None:
    assert told["left"]["final"]["steps"] == 5


def test_a_loss_that_is_not_a_number_is_recorded_as_such(folder: Path) -> None:
    (epoch,) = records(folder, "left", "epoch")
    assert epoch["train_loss"] is None and epoch["nonfinite"] == {"train_loss": "nan"}


def test_without_records_the_numbers_are_returned_all_the_same(told: dict[str, Any]) -> None:
    final = told["unrecorded"]["final"]
    assert final["steps"] == 200 and final["test_accuracy"] == 0.5 and final["throughput"] > 0


def test_importing_the_meter_loads_neither_a_framework_nor_the_engine() -> None:
    heavy = "'torch', 'numpy', 'tensorflow', 'mpi4py', 'pandas', 'qsgd_hpc._core'"
    code = (
        "import sys; from qsgd_hpc.scaling import Meter, record; "
        f"print(sorted({{{heavy}}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
