"""Whole studies on this machine: the real command line, real jobs, real MPI ranks, no framework."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qsgd_hpc.scaling.store import StudyFolder, finished
from tests.processes import until

pytestmark = pytest.mark.serial

# A workload by the convention of scaling/README.md; --hold keeps 8-bit points busy until a file
# exists.
WORKLOAD = """
import argparse, os, time
from pathlib import Path

from mpi4py import MPI
from qsgd_hpc.scaling import record

parser = argparse.ArgumentParser()
parser.add_argument("--global-batch-size", type=int)
parser.add_argument("--batch-size", type=int)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--fail-at", type=int)
parser.add_argument("--mute-at", type=int)
parser.add_argument("--hold", type=Path)
parser.add_argument("--note", default="")
args = parser.parse_args()
ranks, bits = MPI.COMM_WORLD.size, int(os.environ["QSGD_BITS"])
if bits == args.fail_at:
    raise SystemExit(f"asked to fail at {bits} bits")
if MPI.COMM_WORLD.rank == 0:
    for epoch in range(args.epochs):
        record("epoch", epoch=epoch + 1, seconds=2.0, images_per_s=100.0 * ranks)
# All ranks wait here: in a barrier they would spin.
while args.hold and bits == 8 and not args.hold.exists():
    time.sleep(0.05)
if MPI.COMM_WORLD.rank == 0 and bits != args.mute_at:
    record("final", ranks=ranks, images_per_s=100.0 * ranks * (1 + 1 / bits), test_accuracy=0.98,
           wire_bytes=1000 * bits * (ranks - 1), comm_time_s=0.5, steps=10, note=args.note,
           batch=[args.global_batch_size, args.batch_size])
MPI.COMM_WORLD.Barrier()
"""


class Place:
    """A folder with a workload, and the command line in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "work load.py"
        self.script.write_text(WORKLOAD)
        # QSGD_BITS must not leak into the points.
        own = {"QSGD_HOME": str(folder / "home"), "QSGD_SITE": "local", "QSGD_BITS": "2"}
        self.env = {**os.environ, **own}

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "qsgd_hpc", *words],
            cwd=self.folder,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, out + err
        assert "Traceback" not in err, err
        return out, err

    def scale(self, *words: str, code: int = 0, script: str = "work load.py") -> tuple[str, str]:
        options = [w for w in words if not w.startswith("@")]
        own = [w.removeprefix("@") for w in words if w.startswith("@")]
        return self.run(
            "scale", "--site", "local", "-o", "study", *options, script, *own, code=code
        )

    @property
    def study(self) -> StudyFolder:
        return StudyFolder(self.folder / "study")

    def wait_for(self, count: int) -> None:
        """Wait until so many attempts are collected."""
        until(lambda: len(self.study.attempts()[0]) >= count)

    def wait_for_record(self, count: int) -> None:
        """Wait until so many attempts have recorded something: their ranks are up."""
        records = "points/*/attempt-1/records.jsonl"
        until(lambda: len(list(self.study.path.glob(records))) >= count)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.mark.gate
def test_a_study_runs_every_point_and_ends_with_its_table_and_report(place):
    out, _ = place.scale("--bits", "32,4", "--epochs", "2", "@--note", "@a b'c\"d")
    done = finished(place.study.attempts()[0])
    assert sorted(done) == [
        f"work load-batch128-nodes{n}-bits{b}-repeat1" for n, b in ((1, 32), (2, 32), (2, 4))
    ]
    for attempt in done.values():
        assert attempt.final["ranks"] == attempt.point.ranks
        assert attempt.final["note"] == "a b'c\"d"
        assert attempt.final["batch"] == [128, None]
        assert len(attempt.epochs) == 2
        assert attempt.provenance["env"]["QSGD_BITS"] == str(attempt.point.bits)
        assert attempt.provenance["job"]["scheduler"] == "local"
        assert len(attempt.provenance["script_sha256"]) == 64
        assert attempt.final["mpi"] and attempt.final["cpu"]
    assert "On 2 nodes, 4-bit QSGD sent 8.00× fewer bytes" in out
    assert out.rstrip().endswith("study/report.html")
    assert (place.folder / "study" / "report.html").exists()
    raw = place.study.collection.read_bytes()

    again, _ = place.scale("--bits", "32,4", "--epochs", "2", "@--note", "@a b'c\"d")
    assert again.count("finished") == 3 and "job local" not in again
    page = (place.folder / "study" / "report.html").read_bytes()
    place.run("report", "study", "-o", "elsewhere")
    assert (place.folder / "elsewhere" / "report.html").read_bytes() == page
    assert place.study.collection.read_bytes() == raw


def test_a_failed_point_is_shown_with_its_log_and_only_it_is_tried_again(place):
    words = ("--nodes", "1,2", "--bits", "32,4", "@--fail-at", "@4")
    out, err = place.scale(*words, code=1)
    assert "the job ended as FAILED" in out and "asked to fail at 4 bits" in out
    assert "1 of 3 points failed" in err
    before = place.study.collection.read_bytes()
    place.script.write_text(WORKLOAD.replace("if bits == args.fail_at", "if False"))
    out, _ = place.scale(*words)
    assert out.count(": job local-") == 1
    assert place.study.collection.read_bytes().startswith(before)
    assert [a.number for a in place.study.attempts()[0] if a.point.bits == 4] == [1, 2]
    assert "the same script (2 versions)" in (place.folder / "study/REPORT.md").read_text()


@pytest.mark.parametrize("moment", ["runs", "is being submitted"])
def test_ctrl_c_cancels_the_job_and_the_same_command_goes_on(place, moment):
    words = ("scale", "-o", "study", "--bits", "32,8", "work load.py", "--hold", "go")
    process = place.start(*words)
    place.wait_for(1)
    if moment == "runs":
        place.wait_for_record(2)
    else:
        until((place.folder / "home" / "jobs" / "local-2").exists, every_s=0.001)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in err
    assert "points are finished and kept" in err
    listed = json.loads(place.run("list", "--json")[0])
    assert {job["state"] for job in listed} <= {"COMPLETED", "CANCELLED"}
    kept = place.study.collection.read_bytes()
    (place.folder / "go").touch()
    place.run(*words)
    assert place.study.collection.read_bytes().startswith(kept)
    assert len(finished(place.study.attempts()[0])) == 3


def test_after_sigkill_the_running_job_is_followed_not_started_twice(place):
    words = ("scale", "-o", "study", "--nodes", "2", "--bits", "8", "work load.py", "--hold", "go")
    process = place.start(*words)
    place.wait_for_record(1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    # As if it had died before it could note the job's id.
    next((place.folder / "study").glob("points/*/attempt-1/attempt.json")).unlink()
    (place.folder / "go").touch()
    out, _ = place.run(*words)
    assert "of an earlier run" in out
    (only,) = place.study.attempts()[0]
    assert only.number == 1 and only.fault is None


def test_a_script_that_records_nothing_is_told_the_one_line(place):
    (place.folder / "silent.py").write_text("print('trained')")
    _, err = place.scale("--nodes", "1,2", script="silent.py", code=2)
    assert "silent.py ended without an error but recorded no result" in err
    assert 'record("final", ranks=hvd.size(), throughput=' in err
    assert len(place.study.attempts()[0]) == 1


def test_a_script_that_records_nothing_leaves_the_other_scripts_of_a_study_alone(place):
    (place.folder / "mute.py").write_text("print('trained')")
    place.script.rename(place.folder / "one.py")
    file = place.folder / "study.yaml"
    file.write_text("scripts: [mute.py, one.py]\nnodes: [1, 2]\nbits: [32]\n")
    _, err = place.run("scale", "study.yaml", "-o", "study", code=2)
    assert "mute.py ended without an error but recorded no result" in err
    ended = [(a.point.case.workload, a.silent) for a in place.study.attempts()[0]]
    assert sorted(ended) == [("mute", True), ("one", False), ("one", False)]


@pytest.mark.parametrize(("how", "mute"), [("--separate", 32), ("--pack", 4)])
def test_a_point_without_a_result_takes_no_other_with_it(place, how, mute):
    """The second and the first of three; and each is run by what --python names."""
    python, told = place.folder / "python of the nodes", place.folder / "told"
    python.write_text(f"#!/bin/sh\necho \"$*\" >> '{told}'\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    words = ("--nodes", "2", "--bits", "32,8,4", how, "--python", str(python))
    _, err = place.scale(*words, "@--mute-at", f"@{mute}", code=1)
    ended = {a.point.bits: a.silent for a in place.study.attempts()[0]}
    assert ended == {bits: bits == mute for bits in (32, 8, 4)}
    assert "1 of 3 points failed" in err
    assert 'record("final", ranks=hvd.size(), throughput=' in err
    assert told.read_text().count("work load.py --mute-at") == 6  # one a rank


def test_when_all_points_fail_the_end_of_the_log_is_shown(place):
    out, err = place.scale("--nodes", "1", "@--bogus", code=2)
    assert "unrecognized arguments: --bogus" in out
    assert "all 1 points failed" in err


@pytest.mark.gate
def test_faults_are_named_together_before_anything_is_written(place):
    _, err = place.scale("--nodes", "0,2,x", "--bits", "5", script="gone.py", code=2)
    for word in ("--nodes '0'", "--nodes 'x'", "--bits '5'", "gone.py"):
        assert word in err
    assert not (place.folder / "study").exists()


@pytest.mark.gate
def test_a_dry_run_prints_the_plan_and_writes_nothing(place):
    out, _ = place.scale("--dry-run", "--nodes", "1,2", "--bits", "32,8,4", "--repeats", "2")
    assert out.count("to measure") == 8
    assert "One rank sends no gradients" in out
    assert {p.name for p in place.folder.iterdir()} == {"work load.py"}


def test_another_definition_in_the_same_folder_is_refused(place):
    place.scale("--nodes", "1", "--bits", "32")
    _, err = place.scale("--nodes", "1,2", "--bits", "32", code=2)
    assert "nodes: the folder has 1, this command has 1,2" in err


def test_a_batch_site_is_not_charged_without_consent(place):
    words = ("scale", "--site", "polaris", "--account", "me", "--filesystems", "home")
    _, err = place.run(
        *words,
        "--walltime",
        "10m",
        "--ranks-per-node",
        "1",
        "--queue",
        "debug",
        "work load.py",
        code=2,
    )
    assert "Add --yes to submit them" in err
    assert not (place.folder / "scaling-results").exists()


def test_a_packed_study_is_one_job_and_after_sigkill_nothing_is_lost_or_repeated(place):
    words = ("scale", "-o", "study", "--pack", "--bits", "32,8", "work load.py", "--hold", "go")
    process = place.start(*words)
    place.wait_for(2)
    until(lambda: len(list((place.folder / "study/points").glob("*/attempt-1"))) >= 3)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    kept = place.study.collection.read_bytes()
    # As if it had died before it could note the job's id.
    (place.folder / "study/packs/pack-1/pack.json").unlink()
    (place.folder / "go").touch()
    out, _ = place.run(*words)
    assert "1 point: follows job local-1 of an earlier run" in out
    assert place.study.collection.read_bytes().startswith(kept)
    found = place.study.attempts()[0]
    assert [a.number for a in found] == [1, 1, 1] and len({a.point for a in found}) == 3
    for attempt in found:
        assert attempt.fault is None and attempt.held_nodes == 2 and attempt.seconds > 0
        assert attempt.provenance["job"]["id"] == "local-1"
        assert attempt.provenance["env"]["QSGD_BITS"] == str(attempt.point.bits)
    assert len(json.loads(place.run("list", "--json")[0])) == 1


def test_a_packed_job_that_is_cancelled_keeps_its_points_and_another_one_goes_on(place):
    words = ("scale", "-o", "study", "--pack", "--bits", "32,8", "work load.py", "--hold", "go")
    process = place.start(*words)
    place.wait_for(2)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "2 of 3 points are finished" in err, err
    (place.folder / "go").touch()
    place.run(*words[:2], "study", "--separate", *words[4:])  # how it is run may change
    done = finished(place.study.attempts()[0])
    assert len(done) == 3
    assert {a.provenance["job"]["id"] for a in done.values()} == {"local-1", "local-2"}


def test_a_study_file_measures_scripts_side_by_side_and_all_its_faults_are_named(place):
    place.script.rename(place.folder / "one.py")
    (place.folder / "two.py").write_text(WORKLOAD)
    file = place.folder / "study.yaml"
    file.write_text("scripts: [one.py, {scrip: two.py}]\nnodes: 1\nbit: [32]\nmode: [strong]\n")
    _, err = place.run("scale", "--dry-run", "study.yaml", code=2)
    for word in (
        "line 1: unknown key 'scrip' in 'scripts.2'. Did you mean 'script'?",
        "line 1: key 'script' is missing in 'scripts.2'",
        "line 2: 'nodes' must be a list of whole numbers from 1; it is 1",
        "line 3: unknown key 'bit'. Did you mean 'bits'?",
        "line 4: 'mode' must be strong or weak",
    ):
        assert word in err
    file.write_text("scripts: [one.py, {script: two.py, batch_size: 64}]\nnodes: [1]\n")
    out, _ = place.run("scale", "study.yaml", "--repeats", "1", "--pack")
    assert "one.py, two.py, strong scaling" in out and "two, batch 64" in out
    cases = {
        (a.point.case.workload, *a.final["batch"])
        for a in StudyFolder(place.folder / "scaling-results/study-strong").attempts()[0]
    }
    assert cases == {("one", 128, None), ("two", 64, None)}
