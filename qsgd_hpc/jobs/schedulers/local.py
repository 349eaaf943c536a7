"""This machine as a scheduler: a detached process runs each job, see local_runner.py."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs import registry
from qsgd_hpc.jobs.model import Job, JobState, Progress
from qsgd_hpc.jobs.processes import KILL_GRACE_S, STOP_S, alive, end_all
from qsgd_hpc.jobs.schedulers.common import Dependency

__all__ = ["cancel", "find", "refresh", "submit"]

START_GRACE_S = 30.0  # a job that has no owner for longer is LOST


def submit(job: Job, after: Sequence[Dependency] = ()) -> Progress:
    """Start the process that runs the job; return when it has taken over.

    ``after`` is not used: jobs run in the order of their numbers, and the owner checks how its
    dependencies ended.
    """
    safe = ("-P",) if sys.version_info >= (3, 11) else ()
    started = subprocess.run(
        [sys.executable, *safe, "-m", "qsgd_hpc.jobs.local_runner", str(job.directory)],
        cwd=job.directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,  # out of reach of Ctrl-C in the terminal
    )
    if started.returncode != 0:
        log = job.directory / "runner.log"
        detail = started.stderr or (log.read_text("utf-8", "replace") if log.exists() else "")
        last = detail.strip().splitlines()[-1:] or ["it printed nothing"]
        raise LaunchError(f"the process that runs local jobs did not start: {last[0]}")
    return registry.load(job.id).progress


def find(job: Job) -> str | None:
    """Return None: local jobs have no scheduler id."""
    return None


def other_host(job: Job) -> str | None:
    """Return the host that runs a local job, if it is not this one."""
    owner = registry.read_json(job.directory / "runner.json") if job.scheduler == "local" else None
    return owner["host"] if owner and owner["host"] != socket.gethostname() else None


def refresh(jobs: Sequence[Job]) -> dict[str, Progress]:
    """Return the recorded progress, or LOST for jobs whose owner has died."""
    return {job.id: _progress(job) for job in jobs}


def _progress(job: Job) -> Progress:
    owner = registry.read_json(job.directory / "runner.json")
    if owner is None:
        if time.time() - job.submitted_at < START_GRACE_S:
            return job.progress
        return _lost(job.progress, "its submission was interrupted; submit it again")
    if owner["host"] != socket.gethostname():
        why = f"on host {owner['host']}; its current state is known there only"
        return dataclasses.replace(job.progress, why=why)
    if alive(owner["pid"], owner["identity"]):
        return job.progress
    # The owner may have recorded the end and exited since the record was read.
    newest = registry.load(job.id).progress
    if newest.state.ended:
        return newest
    why = "the process that ran it is gone (machine restarted, or it was killed)"
    if alive(newest.pid, newest.identity):
        why += f"; its script still runs. End it with `qsgd-hpc cancel {job.id}`"
    return _lost(newest, why)


def _lost(progress: Progress, why: str) -> Progress:
    return dataclasses.replace(progress, state=JobState.LOST, why=why)


def cancel(job: Job) -> None:
    """End the job and every process it has started, and wait until that is done.

    Raises:
        LaunchError: the job runs on another host, or did not end.
    """
    owner = registry.read_json(job.directory / "runner.json")
    if owner is not None and owner["host"] != socket.gethostname():
        raise LaunchError(f"{job.id} runs on host {owner['host']}. Cancel it there.")
    if owner is not None and alive(owner["pid"], owner["identity"]):
        os.kill(owner["pid"], signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_S + 2 * KILL_GRACE_S
        while alive(owner["pid"], owner["identity"]):
            if time.monotonic() > deadline_s:
                raise LaunchError(f"{job.id} has not ended yet; see {job.directory}/runner.log.")
            time.sleep(0.05)
        return
    left = registry.load(job.id).progress
    if left.pid is not None and alive(left.pid, left.identity):
        end_all(left.pid, session=True)
