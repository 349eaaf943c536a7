"""Wait for jobs without troubling their schedulers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from qsgd_hpc.jobs import registry
from qsgd_hpc.jobs.current import refreshed
from qsgd_hpc.jobs.events import noted_at
from qsgd_hpc.jobs.model import Job, JobState

__all__ = ["Patience", "wait"]

LOCAL_POLL_S, BATCH_POLL_S, LOOK_S = 0.3, 15.0, 0.3


def wait(
    ids: Iterable[str],
    timeout_s: float | None = None,
    on_change: Callable[[Job], None] | None = None,
) -> list[Job]:
    """Return the jobs when all have ended, or as they are after ``timeout_s`` seconds.

    Args:
        ids: of the jobs.
        timeout_s: seconds; None waits for ever.
        on_change: called with each job at first, whenever its state is another one, and when its
            scheduler falls silent or speaks again.
    Raises:
        UsageError: there is no such job.
    """
    wanted = list(ids)
    seen: Mapping[str, tuple[JobState, bool]] = {}
    deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        recorded = [registry.load(job_id) for job_id in wanted]
        # Begun before the question: what a job notes meanwhile is a reason to ask again.
        patience = Patience(recorded)
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
    """When it is worth asking for jobs again.

    A scheduler is asked four times a minute at most, unless a job has noted something meanwhile.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        local = any(job.scheduler == "local" for job in jobs)
        self._end_s = time.monotonic() + (LOCAL_POLL_S if local else BATCH_POLL_S)
        self._folders = [job.directory for job in jobs]
        self._noted = self._look()

    def _look(self) -> list[float]:
        return [noted_at(folder) for folder in self._folders]

    def over(self) -> bool:
        """Tell whether to ask now."""
        return time.monotonic() >= self._end_s or self._look() != self._noted
