"""On one rank the homework's solutions, and what `convert` makes, do what the serial scripts do."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_mpi
TUTORIALS = Path(__file__).parents[2] / "tutorials"
OPTIONS = ["--epochs", "2", "--images", "300"]


def _numbers(text: str) -> list[float]:
    lines = [line for line in text.splitlines() if line.startswith("epoch ")]
    return [float(x) for line in lines for x in re.findall(r"\d+\.\d+", line)]


def _serial(python: str, *command: str) -> str:
    done = subprocess.run([python, *command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("folder", "module"), [("torch", "torch"), ("keras", "keras"), ("tensorflow2", "tensorflow")]
)
def test_one_rank_computes_what_the_serial_script_does(run_ranks, python, tmp_path, folder, module):
    pytest.importorskip(module)
    here = tmp_path / "copy" / folder
    here.mkdir(parents=True)
    for script in (TUTORIALS / "homework" / folder).glob("*.py"):
        (here / script.name).write_text(script.read_text())
    (here.parent / "homework_data.py").symlink_to(TUTORIALS / "homework" / "homework_data.py")
    _serial(python, "-m", "qsgd_hpc", "convert", str(here / "mnist.py"),
            "-o", str(here / "converted.py"))  # fmt: skip
    expected = _numbers(_serial(python, str(here / "mnist.py"), *OPTIONS))
    assert len(expected) == 8
    data = {name: os.environ[name] for name in ("QSGD_DATA",) if name in os.environ}
    records = tmp_path / "records.jsonl"
    for script, more in (("mnist_hvd.py", ["--records", str(records)]), ("converted.py", [])):
        done = run_ranks(1, str(here / script), *OPTIONS, *more, **data)
        assert done.returncode == 0, done.stdout + done.stderr
        assert _numbers(done.stdout) == pytest.approx(expected, rel=1e-3, abs=2e-4), script
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert [(line["ranks"], line["epoch"]) for line in lines] == [(1, 1), (1, 2)]
    assert lines[1]["test_accuracy"] == pytest.approx(expected[7], abs=1e-4)
