"""What a signal to a job of PBS does, with real shells started as PBS starts them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qsgd_hpc import jobs
from qsgd_hpc.jobs.events import read_events
from qsgd_hpc.jobs.model import Job
from tests.jobs.fake_schedulers import Fakes

pytestmark = pytest.mark.full

DEADLINE_S = 60.0
PROFILE = """
extends: pbs
description: a PBS of this test
launcher: {argv: [env]}
setup: ["touch setting-up", "while [ -e wait ]; do sleep 0.02; done"]
"""
# A script that stops at a checkpoint when its job's folder says so, or SIGTERM does.
TRAIN = """
import pathlib, time
import qsgd_hpc, qsgd_hpc.runtime.stopping
qsgd_hpc.runtime.stopping.CHECK_EVERY_S = 0.02
while not qsgd_hpc.should_stop():
    pathlib.Path("running").touch()
    time.sleep(0.02)
qsgd_hpc.exit_for_resubmit()
"""
# As when a scheduler signals each process, and the launcher passes on what it got; then once more.
TOLD_TWICE = """
import os, signal, qsgd_hpc, qsgd_hpc.runtime.stopping
assert not qsgd_hpc.should_stop()
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
assert qsgd_hpc.should_stop()
print("saved", flush=True)
qsgd_hpc.runtime.stopping.SAME_SIGNAL_S = 0.0
os.kill(os.getpid(), signal.SIGTERM)
print("not ended")
"""


@dataclasses.dataclass(frozen=True)
class Mom:
    """A job as the MoM of OpenPBS starts and signals it: see start_exec.c and mom_mach.c there."""

    leader: subprocess.Popen[bytes]

    @classmethod
    def starts(cls, shell: str, stdin: str, log: Path) -> Mom:
        """Start a shell as the leader of a session, with something to read."""
        name = f"-{Path(shell).name}"
        variables = {"SHELL": shell, "PBS_O_SHELL": "/bin/bash", "PBS_JOBID": "1.bed"}
        variables["HOME"] = str(log.parent)  # not with what a login on this machine may do
        given, giver = os.pipe()
        os.write(giver, stdin.encode())  # before the shell runs, as the MoM does
        os.close(giver)
        with log.open("ab") as out, os.fdopen(given) as source:
            leader = subprocess.Popen(
                [name], executable=shell, env={**os.environ, **variables}, stdin=source,
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        return cls(leader)

    def session(self) -> list[int]:
        """Return the processes of the job's session, the leader last."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[3]) == self.leader.pid:
                    found.append(int(stat.parent.name))
        return sorted(found, key=lambda pid: pid == self.leader.pid)

    def signal(self, number: signal.Signals, whole: bool) -> None:
        """Signal the leader alone (as Torque documents it) or all of its session (as OpenPBS)."""
        for pid in self.session() if whole else [self.leader.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self) -> int:
        """Return how the leader ended; with it ends the job, and all that is left of it."""
        code = self.leader.wait(DEADLINE_S)
        self.end()
        return code

    def end(self) -> None:
        self.signal(signal.SIGKILL, whole=True)
        self.leader.wait(DEADLINE_S)


Start = Callable[[str], tuple[Job, Mom]]


@pytest.fixture
def start(fakes: Fakes, tmp_path: Path) -> Iterator[Start]:
    """Submit the training to PBS and start it: in the shell that qsub was told, or from stdin."""
    (tmp_path / "home" / "sites").mkdir(parents=True)
    (tmp_path / "home" / "sites" / "bed.yaml").write_text(PROFILE)
    (tmp_path / "train.py").write_text(TRAIN)
    fakes.says("qsub", "1.bed\n")
    started = []

    def go(how: str) -> tuple[Job, Mom]:
        job = jobs.submit(jobs.JobRequest(Path("train.py"), site="bed", python=sys.executable))
        args = fakes.args("qsub")
        if how == "shell":
            shell = args[args.index("-S") + 1] if "-S" in args else "/bin/bash"
            stdin = f"{args[-1]}\n"
        else:  # a PBS that was built with --disable-shell-pipe
            shell, stdin = "/bin/bash", job.script_path.read_text()
        started.append(Mom.starts(shell, stdin, job.log_path))
        return job, started[-1]

    yield go
    for mom in started:
        mom.end()


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline_s, f"no {path}"
        time.sleep(0.02)


def noted(job: Job) -> list[tuple[str, int | None]]:
    return [(event["event"], event.get("exit_code")) for event in read_events(job.directory)]


def ways(*whens: str, gate: str = "") -> pytest.MarkDecorator:
    """Parametrize by when, to whom and how; one combination is in the gate."""
    choices = {"when": whens, "whom": ("leader", "session"), "how": ("shell", "stdin")}
    if not whens:
        del choices["when"]
    every = {"-".join(way): way for way in itertools.product(*choices.values())}
    return pytest.mark.parametrize(
        list(choices),
        [
            pytest.param(*way, id=name, marks=[pytest.mark.gate] if name == gate else [])
            for name, way in every.items()
        ],
    )


@ways("running", "setup", gate="running-session-shell")
def test_sigusr1_lets_a_job_stop_at_its_checkpoint(
    start: Start, tmp_path: Path, when: str, whom: str, how: str
) -> None:
    (tmp_path / "wait").touch()
    job, mom = start(how)
    wait_for(tmp_path / "setting-up")
    if when == "running":
        (tmp_path / "wait").unlink()
        wait_for(tmp_path / "running")
    mom.signal(signal.SIGUSR1, whole=whom == "session")
    wait_for(job.directory / "stop")
    (tmp_path / "wait").unlink(missing_ok=True)
    assert mom.wait() == 85, job.log_path.read_text()
    assert noted(job) == [("start", None), ("stop", None), ("end", 85)]
    assert (job.directory / "outcome").read_text() == "85\n"


@ways(gate="session-shell")
def test_sigterm_lets_a_job_stop_at_its_checkpoint(
    start: Start, tmp_path: Path, whom: str, how: str
) -> None:
    job, mom = start(how)
    wait_for(tmp_path / "running")
    mom.signal(signal.SIGTERM, whole=whom == "session")
    assert mom.wait() == 85, job.log_path.read_text()
    assert noted(job) == [("start", None), ("terminate", None), ("end", 85)]
    assert not (job.directory / "outcome").exists()


@ways()
def test_sigterm_before_its_ranks_ends_a_job(
    start: Start, tmp_path: Path, whom: str, how: str
) -> None:
    (tmp_path / "wait").touch()
    job, mom = start(how)
    wait_for(tmp_path / "setting-up")
    mom.signal(signal.SIGTERM, whole=whom == "session")
    assert mom.wait() == 143, job.log_path.read_text()
    assert noted(job) == [("start", None), ("terminate", None), ("end", 143)]
    assert not (tmp_path / "running").exists()


def test_sigusr1_to_an_array_of_this_machine_stops_the_task_that_runs(
    fakes: Fakes, tmp_path: Path
) -> None:
    (tmp_path / "home" / "sites").mkdir(parents=True)
    (tmp_path / "home" / "sites" / "here.yaml").write_text(PROFILE.replace("pbs", "local"))
    (tmp_path / "train.py").write_text(TRAIN)
    array = {"lr": ("1", "2")}
    job = jobs.submit(jobs.JobRequest(Path("train.py"), site="here", array=array))
    for task in ("task-0", "task-1"):
        wait_for(tmp_path / "running")
        pid = jobs.get(job.id).progress.pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        wait_for(job.directory / task / "resubmit")
        (tmp_path / "running").unlink()
    (ended,) = jobs.wait([job.id], DEADLINE_S)
    assert (ended.state, ended.exit_code) == (jobs.JobState.STOPPED, 85)
    assert dict(ended.progress.tasks) == {"STOPPED": 2}


def test_the_same_sigterm_twice_is_one_and_a_later_one_ends_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOLD_TWICE], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "saved\n"), done.stderr
