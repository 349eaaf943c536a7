"""Run one job on a machine without a scheduler: ``python -m qsgd_hpc.jobs.local_runner DIR``.

The command returns when a detached process has taken over the job. That process has its own
session, so it survives the terminal. It waits for its turn, runs the job script, enforces the
walltime, handles SIGTERM (cancel), ends the script's remaining processes, and is the only writer of
the job's state. If it dies, readers detect that by runner.json and report the job as LOST.

Jobs of one $QSGD_HOME run one after another, in the order of their numbers, so that they do not
disturb each other's timings: each waits for its living predecessors, then for a lock that the
kernel releases when its holder dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import registry
from qsgd_hpc.jobs.events import end_of, read_events, task_counts, why_not_run
from qsgd_hpc.jobs.model import Job, JobState, Progress, dependency
from qsgd_hpc.jobs.processes import KILL_GRACE_S, STOP_S, adopt_orphans, alive, end_all, identity
from qsgd_hpc.jobs.words import clock

__all__ = ["main"]

POLL_S = 0.2
FULL_DISK_TRIES, FULL_DISK_PAUSE_S = 720, 5.0


class _Cancelled(Exception):
    """SIGTERM arrived: the user wants the job to end."""


def main(argv: list[str]) -> None:
    """Detach, take over the job in directory ``argv[0]``, and run it to its end."""
    directory = Path(argv[0])
    ready, taken_over = os.pipe()
    if os.fork():
        os.close(taken_over)
        sys.exit(0 if os.read(ready, 1) else 1)
    os.close(ready)
    os.setsid()
    signal.signal(signal.SIGTERM, _cancel)
    for number in (signal.SIGHUP, signal.SIGINT):
        # A handler, because the job's processes would inherit SIG_IGN.
        signal.signal(number, _ignore)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # bash cannot trap a signal that was ignored when it started. The job script itself sets
        # these to be ignored by the processes that it starts.
        signal.signal(number, signal.SIG_DFL)
    adopt_orphans()
    _redirect(directory / "runner.log")
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "identity": identity(os.getpid())}
    registry.write_file(directory / "runner.json", json.dumps(owner))
    os.write(taken_over, b"1")
    os.close(taken_over)
    _run_in_turn(registry.load(directory.name))


def _cancel(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, _ignore)
    raise _Cancelled


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Ignore a signal."""


def _redirect(log: Path) -> None:
    """Detach from the terminal: no stdin, messages to the job's directory."""
    with Path(os.devnull).open() as nothing, log.open("a") as messages:
        os.dup2(nothing.fileno(), 0)
        os.dup2(messages.fileno(), 1)
        os.dup2(messages.fileno(), 2)


def _run_in_turn(job: Job) -> None:
    """Run the job when its turn comes, and record its end."""
    progress = Progress()
    try:
        with _turn(job):
            if failed := _unmet(job):
                why = f"{failed}, on which it depends, did not complete"
                progress = Progress(JobState.CANCELLED, why=why)
            else:
                progress = _run(job)
    except _Cancelled:
        progress = Progress(JobState.CANCELLED, why="cancelled before it started")
    except Exception as error:
        progress = Progress(JobState.FAILED, why=f"could not be started: {error}")
        raise
    finally:
        signal.signal(signal.SIGTERM, _ignore)
        _record_end(job, dataclasses.replace(progress, ended_at=time.time()))


def _unmet(job: Job) -> str | None:
    """Return the id of a dependency that did not complete, or None."""
    for word in job.request.after:
        kind, job_id = dependency(word)
        try:
            state = registry.load(job_id).state
        except UsageError:
            continue
        if kind == "ok" and state is not JobState.COMPLETED:
            return job_id
    return None


def _record_end(job: Job, progress: Progress) -> None:
    """Record the end of the job; on a full disk, retry until there is space."""
    for _ in range(FULL_DISK_TRIES):
        try:
            registry.save(job, progress)
            return
        except OSError as error:
            with contextlib.suppress(OSError):  # runner.log is on the same disk
                print(f"cannot record the end of {job.id}: {error}", flush=True)
            time.sleep(FULL_DISK_PAUSE_S)


@contextmanager
def _turn(job: Job) -> Iterator[None]:
    """Wait until all earlier jobs on this host have ended; hold the lock while this one runs."""
    for earlier in registry.ids():
        if registry.number(earlier) < registry.number(job.id):
            recorded = False
            while _holds_the_queue(earlier):
                if not recorded:
                    registry.save(job, Progress(why=f"waits for {earlier}"))
                recorded = True
                time.sleep(POLL_S)
    lock = registry.jobs_dir() / f".{socket.gethostname()}.lock"
    with lock.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError:
            print(f"{lock}: this file system does not support locks; jobs may overlap", flush=True)
        yield


def _holds_the_queue(job_id: str) -> bool:
    try:
        job = registry.load(job_id)
    except UsageError:
        return False
    owner = registry.read_json(job.directory / "runner.json")
    if owner is None or owner["host"] != socket.gethostname():
        return False
    return not job.state.ended and alive(owner["pid"], owner["identity"])


def _run(job: Job) -> Progress:
    """Start the script in a separate session and wait for its end, the walltime or a cancel."""
    walltime_min = job.request.walltime_min
    running = Progress(JobState.RUNNING, started_at=time.time())
    grace_s = STOP_S
    try:
        process = _start(job)
        running = dataclasses.replace(running, pid=process.pid, identity=identity(process.pid))
        registry.save(job, running)
        code = process.wait(None if walltime_min is None else walltime_min * 60)
        grace_s = KILL_GRACE_S  # for what it has left running
        return _by_exit_code(job, running, code)
    except subprocess.TimeoutExpired:
        why = f"ended at its walltime of {clock(walltime_min or 0)}"
        return dataclasses.replace(running, state=JobState.TIMEOUT, why=why)
    except _Cancelled:
        return dataclasses.replace(running, state=JobState.CANCELLED, why="cancelled")
    finally:
        signal.signal(signal.SIGTERM, _ignore)
        end_all(os.getpid(), handlers_s=grace_s)


def _start(job: Job) -> subprocess.Popen[bytes]:
    """Start the script with its interpreter, so that it works on a noexec file system."""
    with job.script_path.open("rb") as script:
        interpreter = script.readline().removeprefix(b"#!").split()
    with job.log_path.open("ab") as log:
        return subprocess.Popen(
            [*interpreter, os.fsencode(job.script_path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _by_exit_code(job: Job, running: Progress, code: int) -> Progress:
    code = 128 - code if code < 0 else code  # as a shell reports signals
    state, why = end_of(code)
    names = {event["event"] for event in read_events(job.directory)}
    return dataclasses.replace(
        running,
        state=state,
        exit_code=code,
        why=why_not_run(job, state, names) or why,
        tasks=task_counts(job),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
