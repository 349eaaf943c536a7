"""record(): one line per event, cheap, and honest about values that JSON cannot hold."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling import record


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "records.jsonl"
    monkeypatch.setenv("QSGD_RECORDS", str(path))
    return path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_without_the_variable_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.delenv("QSGD_RECORDS", raising=False)
    monkeypatch.chdir(tmp_path)
    record("final", images_per_s=1.0)
    assert list(tmp_path.iterdir()) == []


def test_an_event_is_one_line_with_its_origin(records):
    record("epoch", epoch=1, images_per_s=812.5)
    record("final", images_per_s=np.float32(813.0), steps=np.int64(702), shape=(2, 3))
    epoch, final = lines(records)
    assert epoch["event"] == "epoch" and epoch["images_per_s"] == 812.5
    assert final["images_per_s"] == 813.0 and final["steps"] == 702 and final["shape"] == [2, 3]
    assert {"time", "host", "pid", "cpu", "cores", "versions"} <= set(final)
    assert final["versions"]["numpy"] == np.__version__


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_nonfinite_values_become_null_and_are_named(records, value):
    record("epoch", train_loss=value, parts={"a": [1.0, value]})
    (line,) = lines(records)
    assert line["train_loss"] is None and line["parts"] == {"a": [1.0, None]}
    assert line["nonfinite"] == {"train_loss": str(float(value)), "parts.a[1]": str(float(value))}


def test_all_faults_are_named_at_once_and_nothing_is_written(records):
    with pytest.raises(UsageError) as caught:
        record("final", host="x", tensor=np.zeros(3), model=object())
    text = str(caught.value)
    assert "host" in text and "tensor is a ndarray" in text and "model is a object" in text
    assert not records.exists()


def test_a_folder_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("QSGD_RECORDS", str(tmp_path / "gone" / "records.jsonl"))
    with pytest.raises(UsageError, match=r"gone.*No such file"):
        record("final")


def _append_many(worker: int) -> None:
    for i in range(200):
        record("step", worker=worker, i=i, padding="x" * 500)


def test_processes_that_share_a_file_never_mix_their_lines(records):
    context = get_context("spawn")  # frameworks of other tests may have threads here
    workers = [context.Process(target=_append_many, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = lines(records)
    assert len(found) == 800
    for n in range(4):
        assert [r["i"] for r in found if r["worker"] == n] == list(range(200))


def test_importing_record_loads_neither_pandas_nor_matplotlib_nor_mpi():
    code = (
        "import sys; from qsgd_hpc.scaling import record; record('final'); "
        "print([m for m in ('pandas', 'matplotlib', 'mpi4py.MPI', 'rich', 'jinja2') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
