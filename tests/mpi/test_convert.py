"""Converted scripts do on one rank what the serial ones did, and learn as well on two."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

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


def test_what_other_lines_read_is_on_every_rank_and_recorded_once(run_ranks, tmp_path):
    """Trackers, as stand-ins beside the script, a log that a function is given, a table."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    trackers, out = SERIAL.parent / "trackers", tmp_path / "train_hvd.py"
    command = [
        sys.executable,
        "-m",
        "qsgd_hpc",
        "convert",
        str(trackers / "train.py"),
        "-o",
        str(out),
    ]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    done = run_ranks(2, str(out), cwd=tmp_path, PYTHONPATH=str(trackers))
    assert done.returncode == 0, done.stdout + done.stderr
    records = (tmp_path / "records.txt").read_text().splitlines()
    each = ["wandb ['epoch']", "neptune epoch", "comet epoch", "mlflow epoch"]
    assert records == ["wandb ['begin']", "mlflow begin", *each, *each]
    assert (tmp_path / "log.txt").read_text() == "epoch 0\n0,m1,m1\nepoch 1\n1,m1,m1\n"
    total = (tmp_path / "summary.txt").read_text().removeprefix("sum ").strip()
    assert done.stdout.count(f"sum {total[:6]}") == 1


def test_what_meters_average_is_that_of_all_ranks(run_ranks, tmp_path, python):
    """Each rank says an epoch's averages at its end: one rank the serial ones, two the same."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    script, out = SERIAL.parent / "meters" / "imagenet.py", tmp_path / "imagenet_hvd.py"
    command = [sys.executable, "-m", "qsgd_hpc", "convert", str(script), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "To decide" not in done.stderr + done.stdout
    serial = subprocess.run(
        [python, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert serial.returncode == 0, serial.stdout + serial.stderr
    one = run_ranks(1, str(out), cwd=tmp_path)
    assert one.returncode == 0, one.stdout + one.stderr
    assert one.stdout == serial.stdout
    two = run_ranks(2, str(out), cwd=tmp_path)
    assert two.returncode == 0, two.stdout + two.stderr
    for epoch in range(3):
        said = re.findall(rf"^epoch {epoch}: .*", two.stdout, re.MULTILINE)
        assert len(said) == 2 and said[0] == said[1]
