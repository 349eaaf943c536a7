"""Scaling studies on a real Slurm of four nodes: a job for each point, and all in one job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qsgd_hpc import jobs
from qsgd_hpc.scaling.store import Attempt, StudyFolder, finished
from tests.processes import until
from tests.slurm.bed import Bed

pytestmark = pytest.mark.timeout(1800)
WAIT_S = 240.0

# Every rank says on which host it is; 8-bit points last until a file is there.
WORKLOAD = """
import os, pathlib, socket, time
from mpi4py import MPI
from qsgd_hpc.scaling import record

world = MPI.COMM_WORLD
hosts = world.gather(socket.gethostname())
if world.rank == 0:
    while os.environ["QSGD_BITS"] == "8" and not pathlib.Path("go").exists():
        time.sleep(0.1)
    record("final", ranks=world.size, images_per_s=100.0 * world.size, ranks_on=sorted(hosts))
world.Barrier()
"""
START = (sys.executable, "-m", "qsgd_hpc")
SCALE = ("scale", "--yes", "-o", "study")
# As scale, but it gives up on a job that Slurm does not know after a second, not a minute.
IMPATIENT = """
from qsgd_hpc.jobs.schedulers import common
from qsgd_hpc.cli import main

common.SETTLE_S = 1.0
main()
"""
SIZES = ("--nodes", "1,2,3", "--ranks-per-node", "2", "--bits", "32,8", "--walltime", "5m")
BATCH = ("--batch-size", "24")  # for 2, 4 and 6 ranks


def scale(site: str, *words: str, start: tuple[str, ...] = START) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*start, *SCALE, "--site", site, *SIZES, *BATCH, *words, "work.py"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def checked(site: str, *words: str, count: int) -> list[Attempt]:
    """Interrupt a study by SIGKILL while a point runs, resume it, and return its attempts.

    Args:
        site: the profile's name.
        words: more options of ``scale``.
        count: the jobs that Slurm must have before that.
    """
    Path("work.py").write_text(WORKLOAD)
    first = scale(site, *words)
    # A point of 8 bit has begun, which lasts; and, packed, the job goes on without the command.
    logs = "*bits8*/attempt-1/output.log"
    until(lambda: list(Path("study/points").glob(logs)) or _running(), WAIT_S, process=first)
    until(
        lambda: len([j for j in jobs.list_jobs() if j.progress.scheduler_id]) == count,
        WAIT_S,
        process=first,
    )
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    folder = StudyFolder(Path("study"))
    kept = folder.collection.read_bytes()
    Path("go").touch()
    again = scale(site, *words)
    out, _ = again.communicate(timeout=WAIT_S)
    assert again.returncode == 0, out
    assert folder.collection.read_bytes().startswith(kept)
    found = folder.attempts()[0]
    assert [a.number for a in found] == [1] * 6, out
    assert len(finished(found)) == 6
    for attempt in found:
        hosts = attempt.final["ranks_on"]
        assert len(hosts) == attempt.point.ranks
        assert sorted(set(hosts)) == sorted(hosts[::2]), hosts  # two ranks on each
        assert len(set(hosts)) == attempt.point.nodes
        assert attempt.final["place"]["scheduler_job"]
    return found


def _running() -> bool:
    """Tell whether a job of one 8-bit point is running."""
    return any(
        job.state is jobs.JobState.RUNNING and job.request.env.get("QSGD_BITS") == "8"
        for job in jobs.list_jobs()
    )


@pytest.mark.parametrize("site", ["bed", "mpiexec"])
def test_packed_points_share_one_job_and_are_resumed_after_sigkill(bed: Bed, site: str) -> None:
    found = checked(site, "--pack", count=1)
    assert len({a.final["place"]["scheduler_job"] for a in found}) == 1
    assert {a.held_nodes for a in found} == {3}
    assert len(jobs.list_jobs()) == 1


def test_separate_points_are_jobs_of_their_own_and_are_resumed_after_sigkill(bed: Bed) -> None:
    found = checked("bed", "--in-flight", "6", count=6)
    assert len({a.final["place"]["scheduler_job"] for a in found}) == 6
    assert len(jobs.list_jobs()) == 6


@pytest.mark.parametrize("words", [("--pack",), ("--in-flight", "6")], ids=["packed", "separate"])
def test_a_study_killed_before_slurm_had_its_job_submits_another(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    Path("work.py").write_text(WORKLOAD)
    Path("go").touch()
    deadly = tmp_path / "deadly"
    deadly.mkdir()
    (deadly / "sbatch").write_text("#!/bin/sh\nkill -KILL $PPID\n")
    (deadly / "sbatch").chmod(0o755)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{deadly}:{path}")
    first = scale("bed", *words)
    first.communicate(timeout=WAIT_S)
    assert first.returncode == -signal.SIGKILL
    assert len(jobs.list_jobs()) == 1
    monkeypatch.setenv("PATH", path)
    again = scale("bed", *words, start=(sys.executable, "-c", IMPATIENT))
    out, _ = again.communicate(timeout=WAIT_S)
    assert again.returncode == 0, out
    found = StudyFolder(Path("study")).attempts()[0]
    assert len(found) == len(finished(found)) == 6, out  # the lost job is no failed attempt
    assert len(jobs.list_jobs()) == (2 if "--pack" in words else 7)
