"""Converted scripts do on one rank what the serial ones did, and learn as well on two."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("libcst")
pytestmark = [pytest.mark.one_mpi, pytest.mark.timeout(1800)]

SERIAL = Path(__file__).parents[1] / "convert" / "serial"
NEEDS = {
    "torch": "torch", "keras": "keras", "tf2": "tensorflow", "tf1": "tensorflow", "jax": "jax",
}  # fmt: skip
# How much larger than the serial script's the last loss may be on two ranks: there are half as many
# steps with a batch twice as large.
LARGER = 1.6


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"(?i)^epoch.*?loss:? ([\d.]+)", text, re.MULTILINE)]


@pytest.mark.parametrize("name", sorted(path.stem for path in SERIAL.glob("*.py")))
def test_one_rank_does_what_the_script_did_and_two_learn_as_well(run_ranks, tmp_path, name, python):
    if find_spec(NEEDS[name.partition("_")[0]]) is None or find_spec("sklearn") is None:
        pytest.skip("its framework is not installed")
    script, out = SERIAL / f"{name}.py", tmp_path / f"{name}_hvd.py"
    command = [sys.executable, "-m", "qsgd_hpc", "convert", str(script), "-o", str(out)]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    serial = subprocess.run(
        [python, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert serial.returncode == 0, serial.stdout + serial.stderr
    found = {}
    for ranks in (1, 2):
        done = run_ranks(ranks, str(out), cwd=tmp_path, timeout_s=600)
        assert done.returncode == 0, done.stdout + done.stderr
        found[ranks] = losses(done.stdout)
    expected = losses(serial.stdout)
    assert len(expected) >= 3 and expected[-1] < expected[0]
    assert found[1] == pytest.approx(expected, rel=1e-4, abs=2e-6)
    assert len(found[2]) == len(expected), "rank 0 alone prints"
    assert found[2][-1] < max(LARGER * expected[-1], expected[-1] + 0.02)
