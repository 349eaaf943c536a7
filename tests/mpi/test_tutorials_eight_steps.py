"""The pairs of scripts differ in the eight steps alone, which do nothing on one rank."""

from __future__ import annotations

import difflib
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_mpi
LESSONS = Path(__file__).parents[2] / "tutorials" / "eight_steps"
NEEDS = {
    "torch": "torch", "keras": "tensorflow", "tensorflow2": "tensorflow",
    "tensorflow1": "tensorflow", "jax": "optax",
}  # fmt: skip


def _body(path: Path) -> list[str]:
    """Return the lines behind the docstring, without indentation and empty lines."""
    text = path.read_text(encoding="utf-8").split('"""', 2)[2]
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.gate
@pytest.mark.parametrize("framework", NEEDS)
def test_a_pair_differs_in_the_eight_steps_and_imports_alone(framework: str) -> None:
    serial, distributed = (_body(LESSONS / framework / f"{n}.py") for n in ("train", "train_hvd"))
    pairs = difflib.SequenceMatcher(None, serial, distributed, autojunk=False).get_opcodes()
    for kind, _, _, begin, end in pairs:
        added = distributed[begin:end]
        unmarked = [line for line in added if not line.startswith(("import ", "# Step"))]
        marked = any(line.startswith("# Step") for line in added)
        assert kind == "equal" or marked or not unmarked, added
    steps = re.findall(r"^# Step (\d)", "\n".join(distributed), re.MULTILINE)
    assert sorted(set(steps)) == list("12345678")


@pytest.mark.parametrize("framework", NEEDS)
def test_one_rank_prints_what_the_serial_script_prints(
    run_ranks, tmp_path: Path, python: str, framework: str
) -> None:
    if find_spec(NEEDS[framework]) is None or find_spec("sklearn") is None:
        pytest.skip("its framework is not installed")
    serial = subprocess.run(
        [python, str(LESSONS / framework / "train.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    alone = run_ranks(1, str(LESSONS / framework / "train_hvd.py"), cwd=tmp_path)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    expected, found = (re.findall(r"loss ([\d.]+)", out) for out in (serial.stdout, alone.stdout))
    assert len(expected) == 5
    assert [float(x) for x in found] == pytest.approx([float(x) for x in expected], abs=2e-3)
