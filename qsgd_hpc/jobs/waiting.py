"""Wait for jobs with few queries to their schedulers, and refuse to wait for what never ends.

A local job that runs this process must not wait for jobs that wait for its end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from qsgd_hpc import env
from qsgd_hpc._notices import muted
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import registry
from qsgd_hpc.jobs.current import get, refreshed
from qsgd_hpc.jobs.events import last_event_at, read_events
from qsgd_hpc.jobs.model import Job, JobState
from qsgd_hpc.jobs.schedulers.local import other_host
from qsgd_hpc.jobs.words import listing

__all__ = ["Patience", "refuse_standstill", "wait", "why_never_ends"]

LOCAL_POLL_S, BATCH_POLL_S, LOOK_S = 0.3, 15.0, 0.3
SOON_S = 1.0
TASKS_LOOKED_AT = 32
_LAST = ("end", "skip", "refuse")  # only another start can follow these events


def wait(
    ids: Iterable[str],
    timeout_s: float | None = None,
    on_change: Callable[[Job], None] | None = None,
) -> list[Job]:
    """Wait until all jobs have ended, or for ``timeout_s`` seconds, and return them.

    Args:
        ids: the jobs to wait for.
        timeout_s: seconds; None: no limit.
        on_change: called with each job at first, after each change of its state, and when its
            scheduler stops or resumes answering.
    Raises:
        UsageError: a job does not exist, or this process is part of a local job that must end
            before it can start.
    """
    wanted = list(ids)
    seen: Mapping[str, tuple[JobState, bool]] = {}
    deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    patience = Patience()
    while True:
        recorded = [registry.load(job_id) for job_id in wanted]
        patience.begin(recorded)
        with muted(any(silent for _, silent in seen.values())):
            jobs = refreshed(recorded)
        if not seen:
            refuse_standstill(jobs)
        for job in jobs:
            if on_change and seen.get(job.id) != _shown(job):
                on_change(job)
        seen = {job.id: _shown(job) for job in jobs}
        if all(job.state.ended for job in jobs) or time.monotonic() >= deadline_s:
            return jobs
        while not patience.over() and (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left_s))


def _shown(job: Job) -> tuple[JobState, bool]:
    return job.state, bool(job.progress.silence)


class Patience:
    """Decides when to query jobs again.

    A scheduler is queried at most four times a minute, unless a job has written an event. The
    scheduler may report the end of a job later than the job itself: after a job has recorded its
    end, the scheduler is queried again after 1, 2, 4 and 8 seconds.
    """

    def __init__(self) -> None:
        self._queries: dict[str, int] = {}  # by job id, since the job has recorded its end
        self._open: list[Job] = []
        self._seen: list[float] = []
        self._earliest_s = self._latest_s = 0.0

    def begin(self, jobs: Iterable[Job]) -> None:
        """Start to wait; call this before schedulers are queried, so that no event is missed."""
        self._open = [job for job in jobs if not job.state.ended]
        self._seen = self._events()
        over = [job.id for job in self._open if _has_recorded_end(job)]
        self._queries = {job_id: self._queries.get(job_id, 0) + 1 for job_id in over}
        local = any(job.scheduler == "local" for job in self._open)
        pauses_s = [LOCAL_POLL_S if local else BATCH_POLL_S]
        pauses_s += [SOON_S * 2.0 ** (count - 1) for count in self._queries.values()]
        now_s = time.monotonic()
        self._earliest_s, self._latest_s = now_s + SOON_S, now_s + min(pauses_s)

    def _events(self) -> list[float]:
        """Return a number for each open job that changes when the job records an event."""
        return [
            float(_has_recorded_end(job)) if job.request.array else last_event_at(job.directory)
            for job in self._open
        ]

    def over(self) -> bool:
        """Return whether to query now."""
        now_s = time.monotonic()
        return now_s >= self._latest_s or (
            now_s >= self._earliest_s and self._events() != self._seen
        )


def _has_recorded_end(job: Job) -> bool:
    """Return whether a job has recorded its end; for an array with few tasks, of each task."""
    tasks = len(job.request.tasks)
    if tasks > TASKS_LOOKED_AT:
        return False
    folders = [job.task_directory(n) for n in range(tasks)] or [job.directory]
    return all(
        (events := read_events(folder)) and events[-1]["event"] in _LAST for folder in folders
    )


def _own_job() -> Job | None:
    """Return the local job of this QSGD_HOME that runs this process, or None."""
    folder = env.get("QSGD_JOB_DIR")
    if not folder:
        return None
    jobs_dir = registry.jobs_dir().resolve()
    for path in (Path(folder).resolve(), Path(folder).resolve().parent):  # or a task's folder
        if path.parent == jobs_dir:
            try:
                job = get(path.name)
            except UsageError:
                return None
            here = job.scheduler == "local" and other_host(job) is None
            return job if here and not job.state.ended else None
    return None


def refuse_standstill(jobs: Iterable[Job]) -> None:
    """Refuse to wait, in a local job, for this job itself or for jobs queued behind it.

    Args:
        jobs: with their current states.
    Raises:
        UsageError: such jobs, with the remedy.
    """
    local = [j for j in jobs if j.scheduler == "local" and not j.state.ended]
    if not local or (own := _own_job()) is None:
        return
    if any(job.id == own.id for job in local):
        raise UsageError(
            f"{own.id} is the job that runs this command: it would wait for its own end. Leave "
            f"{own.id} out, or run this command outside of the job."
        )
    queued = [j.id for j in local if j.state is JobState.QUEUED and other_host(j) is None]
    if queued:
        raise UsageError(
            f"waiting for {listing(queued, 'and')} here would never end: {_reason(own)}. Let "
            f"{own.id} end without waiting, and submit what comes after as another job: "
            f"`qsgd-hpc submit --after {queued[-1]} SCRIPT`."
        )


def why_never_ends() -> str | None:
    """Return why waiting here for a new local job would never end, or None."""
    return None if (own := _own_job()) is None else _reason(own)


def _reason(own: Job) -> str:
    return (
        "jobs of this machine run one after another, and this command is part of "
        f"{own.id}, which would have to end first"
    )
