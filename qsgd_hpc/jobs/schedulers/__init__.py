"""One module for each scheduler: how to submit, ask and cancel. Each is argv plus a parser."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, cast

from qsgd_hpc.jobs.model import Job, Progress

__all__ = ["Scheduler", "scheduler"]


class Scheduler(Protocol):
    """What every module of this package offers."""

    def submit(self, job: Job) -> Progress:
        """Hand the job over and return its first progress; LaunchError when it is refused."""

    def refresh(self, jobs: Sequence[Job]) -> dict[str, Progress]:
        """Return the progress now, by job id, of those that something is known about."""

    def cancel(self, job: Job) -> None:
        """Ask for the end of a job; LaunchError when that is refused."""


def scheduler(name: str) -> Scheduler:
    """Return the module for a profile's ``scheduler``."""
    return cast(Scheduler, importlib.import_module(f"{__name__}.{name}"))
