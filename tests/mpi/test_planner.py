"""Jobs that measure their machine, by default or for open bits, and the next that recalls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROGRAM = """
import hashlib, json, sys
import numpy as np
from qsgd_hpc import compression
from qsgd_hpc.runtime import basics, ops
asks = json.loads(sys.argv[1])
basics.init()
at_start = basics.context().engine.machine()
kind = compression.Qsgd if asks else compression.Auto
coding = (kind(**asks) if asks is not None else compression.from_environment()).coding()
digest = hashlib.sha256()
for step in range(20):
    x = np.random.default_rng(basics.rank() + step).standard_normal(1 << 18).astype(np.float32)
    exact = sum(
        np.random.default_rng(rank + step).standard_normal(1 << 18).astype(np.float32)
        for rank in range(basics.size())
    )
    buffer = ops.Buffer(x.ctypes.data, x.shape, "float32", x)
    facts = {"name": "w", "op": ops.Sum, "coding": coding, "result": lambda: None}
    ops.allreduce(buffer, buffer, **facts).wait()
    digest.update(x.tobytes())
    assert np.square(x - exact).sum() < 0.2 * np.square(exact).sum()
engine = basics.context().engine
print(json.dumps({
    "rank": basics.rank(),
    "at_start": at_start is not None,
    "ranks": engine.machine().ranks,
    "digest": digest.hexdigest(),
    "coding": [q["coding"] for q in engine.quality().values()][0],
}))
"""


@pytest.fixture
def job(run_ranks, tmp_path: Path):
    """Return job(asks, **environ), which returns what each rank found, and standard error."""
    script = tmp_path / "job.py"
    script.write_text(PROGRAM)

    def run(asks: dict[str, object] | None, **environ: str) -> tuple[list[dict[str, object]], str]:
        home = {"QSGD_HOME": str(tmp_path / "home"), "QSGD_PLANNER": "advise"}
        done = run_ranks(2, str(script), json.dumps(asks), **{**home, **environ})
        assert done.returncode == 0, done.stdout + done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert sorted(rank["rank"] for rank in found) == [0, 1]
        assert len({rank["digest"] for rank in found}) == 1
        return found, done.stderr

    return run


def kept(tmp_path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("home/machines/*.json")}


@pytest.mark.gate
def test_open_bits_are_chosen_by_what_one_job_measures_and_the_next_recalls(job, tmp_path):
    first, said = job(None, QSGD_BITS="auto")
    assert said.count("planner: with bits=auto, 262144 elements are sent as ") == 1
    measured = kept(tmp_path)
    assert len(measured) == 1
    again, _ = job({})
    assert kept(tmp_path) == measured
    for rank in (*first, *again):
        assert rank["at_start"]  # so nothing is measured in the midst of the training
        assert rank["ranks"] == 2
        assert rank["coding"] == first[0]["coding"]
    assert {rank["digest"] for rank in again} == {first[0]["digest"]}


def test_bits_of_the_script_are_obeyed_and_the_machine_is_measured_in_its_first_step(job, tmp_path):
    found, _ = job({"bits": 4})
    assert len(kept(tmp_path)) == 1
    for rank in found:
        assert not rank["at_start"]
        assert rank["coding"].startswith("qsgd(bits=4,")


def test_a_damaged_measurement_is_told_and_made_anew(job, tmp_path):
    job(None, QSGD_BITS="4")
    (file,) = tmp_path.glob("home/machines/*.json")
    file.write_text("{")
    _, said = job(None, QSGD_BITS="4")
    assert f"{file} is damaged" in said
    assert json.loads(file.read_text())["machine"]["ranks"] == 2
