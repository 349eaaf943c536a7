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
