"""Progress events of a running study."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from qsgd_hpc.jobs import Job
from qsgd_hpc.scaling.define.plan import Point
from qsgd_hpc.scaling.store.attempts import Attempt

__all__ = ["Ended", "Watcher"]


class Ended(NamedTuple):
    """A point whose attempt is in the collection, with its log."""

    point: Point
    attempt: Attempt
    log: Path


class Watcher(Protocol):
    """Receives the events of a study; progress.py shows them."""

    def packed(self, job: Job, points: int, *, adopted: bool) -> None:
        """A job of many points was submitted, or found from an earlier run."""

    def started(self, point: Point, job: Job, *, adopted: bool) -> None:
        """A point's own job was submitted or found again, or it began inside a packed job."""

    def seen(self, point: Point, job: Job, speed: tuple[float, str] | None) -> None:
        """A running point was polled; `speed` is its newest throughput and unit."""

    def ended(self, point: Point, attempt: Attempt, log: Path) -> None:
        """A point's job, or its part of one, ended; its records are in the collection."""
