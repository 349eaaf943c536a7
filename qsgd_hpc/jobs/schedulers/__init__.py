"""One module for each scheduler, to submit, find, query and cancel: argv and a parser."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, cast

from qsgd_hpc.jobs.model import Job, Progress
from qsgd_hpc.jobs.schedulers.common import Dependency

__all__ = ["Dependency", "Scheduler", "scheduler"]


class Scheduler(Protocol):
    """The interface of every module of this package."""

    def submit(self, job: Job, after: Sequence[Dependency] = ()) -> Progress:
        """Submit the job, to start after others, and return its first progress.

        Raises:
            LaunchError: it is refused.
            UnconfirmedError: it is unknown whether the job was accepted; the record must stay.
        """

    def find(self, job: Job) -> str | None:
        """Return the scheduler's id of a job whose submission was not confirmed, or None.

        Raises:
            LaunchError: the scheduler does not answer.
        """

    def refresh(self, jobs: Sequence[Job]) -> dict[str, Progress]:
        """Return the current progress by job id, of jobs whose state can still change."""

    def cancel(self, job: Job) -> None:
        """Request the end of a job; LaunchError if that is refused."""


def scheduler(name: str) -> Scheduler:
    """Return the module for a profile's ``scheduler``."""
    return cast(Scheduler, importlib.import_module(f"{__name__}.{name}"))
