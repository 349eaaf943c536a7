"""Wait for jobs with few queries to their schedulers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping

from qsgd_hpc._notices import muted
from qsgd_hpc.jobs.current import refreshed
from qsgd_hpc.jobs.model import Job, JobState
from qsgd_hpc.jobs.records import registry
from qsgd_hpc.jobs.records.events import noted_at, read_events

__all__ = ["Patience", "wait"]

LOCAL_POLL_S, BATCH_POLL_S, LOOK_S = 0.3, 15.0, 0.3
SOON_S = 1.0
TASKS_LOOKED_AT = 32
_LAST = ("end", "skip", "refuse")  # events after which nothing comes but another start


def wait(
    ids: Iterable[str],
    timeout_s: float | None = None,
    on_change: Callable[[Job], None] | None = None,
) -> list[Job]:
    """Return the jobs when all have ended, or their states after ``timeout_s`` seconds.

    Args:
        ids: ids of the jobs.
        timeout_s: seconds; None: no limit.
        on_change: called with each job at first, after each change of its state, and when its
            scheduler stops or resumes answering.
    Raises:
        UsageError: the job does not exist.
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
        for job in jobs:
            if on_change and seen.get(job.id) != _told(job):
                on_change(job)
        seen = {job.id: _told(job) for job in jobs}
        if all(job.state.ended for job in jobs) or time.monotonic() >= deadline_s:
            return jobs
        while not patience.over() and (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left_s))


def _told(job: Job) -> tuple[JobState, bool]:
    return job.state, bool(job.progress.silence)


class Patience:
    """Decides when to query jobs again.

    A scheduler is queried at most four times a minute, unless a job has written an event. It
    determines how a job ended and may need some time: after a job has recorded its end,
    it is queried again after 1, 2, 4 and 8 seconds.
    """

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}  # how often since a job has noted its end
        self._open: list[Job] = []
        self._noted: list[float] = []
        self._soon_s = self._late_s = 0.0

    def begin(self, jobs: Iterable[Job]) -> None:
        """Begin to wait, before the schedulers are queried, so that no event is missed."""
        self._open = [job for job in jobs if not job.state.ended]
        self._noted = self._look()
        over = [job.id for job in self._open if _noted_end(job)]
        self._asked = {job_id: self._asked.get(job_id, 0) + 1 for job_id in over}
        local = any(job.scheduler == "local" for job in self._open)
        patience_s = [LOCAL_POLL_S if local else BATCH_POLL_S]
        patience_s += [SOON_S * 2.0 ** (count - 1) for count in self._asked.values()]
        now_s = time.monotonic()
        self._soon_s, self._late_s = now_s + SOON_S, now_s + min(patience_s)

    def _look(self) -> list[float]:
        return [
            float(_noted_end(job)) if job.request.array else noted_at(job.directory)
            for job in self._open
        ]

    def over(self) -> bool:
        """Return whether to query now."""
        now_s = time.monotonic()
        return now_s >= self._late_s or (now_s >= self._soon_s and self._look() != self._noted)


def _noted_end(job: Job) -> bool:
    """Return whether a job has recorded its end; for an array with few tasks, of each task."""
    tasks = len(job.request.tasks)
    if tasks > TASKS_LOOKED_AT:
        return False
    folders = [job.directory / f"task-{n}" for n in range(tasks)] or [job.directory]
    return all(
        (events := read_events(folder)) and events[-1]["event"] in _LAST for folder in folders
    )
