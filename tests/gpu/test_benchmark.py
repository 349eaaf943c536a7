"""The kernels' benchmark runs, over the twin, and its contestants do what their names say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_the_benchmark_prints_every_contestant(twin: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "kernels.py")]
    done = subprocess.run(
        [*command, "--elements", "2048", "--samples", "2", "--json", str(tmp_path / "rows.json")],
        env={**os.environ, "QSGD_GPU_LIBRARY": str(twin)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = ["copy", *2 * ["encode", "fused", "decode", "torch, eager", "torch.compile"]]
    names += 2 * ["eden encode", "eden fused", "eden decode"]
    assert [line[:14].strip() for line in done.stdout.splitlines()[2:]] == names
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["name"] for row in rows] == names
    assert rows[0]["of_copy"] == 1


def test_the_peer_quantises_without_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    from kernels import BUCKET, quantise

    x = torch.randn(4 * BUCKET)
    mean = np.zeros(x.numel())
    for _ in range(200):
        norm, codes = quantise(x, 8)
        mean += ((codes.int() - 127) * norm / 127).flatten().numpy() / 200
    level = norm.repeat(1, BUCKET).flatten().numpy() / 127
    assert (np.abs(mean - x.numpy()) < 6 * level / np.sqrt(4 * 200)).all()


@pytest.mark.serial
def test_the_training_compares_contestants_whose_replicas_are_equal(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks" / "gpu" / "training.py")
    rows = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "qsgd_hpc", "run", "-np", "2", script, "--device", "cpu", "--tiny",
         "--steps", "3", "--contestants", "no communication,hvd 4,ddp,ddp 4", "--json", str(rows)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    whats = ["no communication", "hvd 4", "ddp", "ddp 4"]
    assert [(row["task"], row["what"]) for row in found] == [
        (task, what) for task in ("gpt", "resnet50") for what in whats
    ]
    for row in found:
        assert row["ranks"] == 2
        assert row["identical"]
        # A hook is called for each gradient, or for each of DDP's buckets.
        assert (row["hook_calls"] > 20) == (row["what"] in whats[:2])


def test_waits_are_counted_from_the_first_gradient_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    from training import GRADIENTS, STEP, counted

    step, wait, copy = (STEP, 50, 90), "cudaStreamSynchronize", "Memcpy DtoH (Device -> Pageable)"
    around = [(wait, 5, 6), (copy, 95, 96), (STEP, 70, 99), ("cudaEventQuery", 20, 21)]
    within = [(wait, 12, 13), (copy, 14, 15), ("cudaEventSynchronize", 30, 31), (copy, 60, 61)]
    first = [(GRADIENTS, 40, 40), (GRADIENTS, 10, 10)]
    assert counted([step, *first, *around, *within]) == [2, 1, 0, 1]
    assert counted([step, *around, *within]) == [3, 1, 0, 1]
