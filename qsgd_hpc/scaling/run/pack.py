"""The plan of a packed job, which its driver reads from plan.json; pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsgd_hpc.scaling.define.plan import Point
from qsgd_hpc.scaling.run.cost import expected_s
from qsgd_hpc.scaling.store.folder import AttemptFolder

__all__ = ["Entry", "PackPlan", "fits", "outcome_state"]

# A point may take 10 % longer than similar ones, and needs some seconds to start.
SLOWER, START_S = 1.1, 5.0
JOB_ENDS = ("TIMEOUT", "CANCELLED", "NODE_FAIL", "LOST")


@dataclass(frozen=True)
class Entry:
    """One point of a packed job: its attempt, and the script that measures it on its nodes."""

    point: Point
    attempt: AttemptFolder
    script: Path

    @property
    def hosts(self) -> Path:
        """The file that names the nodes of this point."""
        return self.attempt.path / "hosts"

    def to_json(self) -> dict[str, Any]:
        return {
            "point": self.point.to_json(),
            "attempt": self.attempt.number,
            "folder": str(self.attempt.path),
            "script": str(self.script),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Entry:
        place = AttemptFolder(Path(body["folder"]), body["attempt"])
        return cls(Point.from_json(body["point"]), place, Path(body["script"]))


@dataclass(frozen=True)
class PackPlan:
    """The plan of a packed job's driver.

    Attributes:
        entries: in the order of measurement.
        mode: "strong" or "weak", for the expected times.
        times: seconds of the points measured before.
        per_host: lines per node in a step's host file; None: as in the scheduler's file.
    """

    entries: tuple[Entry, ...]
    mode: str
    times: Mapping[Point, float]
    per_host: int | None

    def to_text(self) -> str:
        """Return the plan as the text of plan.json."""
        body = {
            "mode": self.mode,
            "per_host": self.per_host,
            "times": [[p.to_json(), s] for p, s in self.times.items()],
            "entries": [e.to_json() for e in self.entries],
        }
        return json.dumps(body, indent=1) + "\n"

    @classmethod
    def from_text(cls, text: str) -> PackPlan:
        """Read the text of :meth:`to_text`; raises ValueError, KeyError or TypeError."""
        body = json.loads(text)
        return cls(
            entries=tuple(Entry.from_json(e) for e in body["entries"]),
            mode=body["mode"],
            times={Point.from_json(p): s for p, s in body["times"]},
            per_host=body["per_host"],
        )


def fits(point: Point, times: Mapping[Point, float], mode: str, left_s: float | None) -> bool:
    """Return whether a point is expected to end before its job does; `left_s` remain.

    True if its time is unknown: if it is cut off, no more is lost than by leaving the time unused.
    """
    expected = expected_s(point, times, mode)
    return left_s is None or expected is None or expected * SLOWER + START_S <= left_s


def outcome_state(
    outcome: Mapping[str, Any] | None, job_state: str, *, is_last: bool
) -> tuple[str, int | None]:
    """Return the state and exit code of a point that began in a job that has ended.

    A point without an outcome was cut off, so it has the state of the job. The last point of a job
    that was ended from outside was cut off too, whatever state its launcher reported.
    """
    cut_off = job_state if job_state in JOB_ENDS else "LOST"
    if outcome is None:
        return cut_off, None
    if outcome["state"] == "FAILED" and is_last and job_state in JOB_ENDS:
        return cut_off, outcome["exit_code"]
    return outcome["state"], outcome["exit_code"]


def begun(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries whose measurement has begun: their attempts have a folder."""
    return [e for e in entries if e.attempt.path.is_dir()]
