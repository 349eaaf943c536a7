"""One attempt at a point, as the study's records.jsonl keeps it; pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from qsgd_hpc.scaling.plan import Point

__all__ = [
    "RECORD_HINT",
    "Attempt",
    "finished",
    "is_number",
    "parse_attempts",
    "parse_records",
]

FORMAT = 1
COMPLETED = "COMPLETED"
RECORD_HINT = (
    "Add one line to its end, and `from qsgd_hpc.scaling import record` to its top:\n"
    '  if hvd.rank() == 0: record("final", ranks=hvd.size(), images_per_s=..., test_accuracy=...)'
)


@dataclass(frozen=True)
class Attempt:
    """A job that ended, with the records its script wrote, verbatim, and where they come from."""

    point: Point
    number: int
    state: str
    exit_code: int | None
    records: tuple[Mapping[str, Any], ...] = ()
    torn_lines: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def final(self) -> Mapping[str, Any]:
        """The last "final" record, or an empty one."""
        return next((r for r in reversed(self.records) if r.get("event") == "final"), {})

    @property
    def epochs(self) -> tuple[Mapping[str, Any], ...]:
        """The "epoch" records in the order in which they were written."""
        return tuple(r for r in self.records if r.get("event") == "epoch")

    @property
    def silent(self) -> bool:
        """Whether the script ended well and yet recorded no result: it lacks the one line."""
        return self.state == COMPLETED and not self.final

    @property
    def fault(self) -> str | None:
        """Why this attempt is no measurement, in words; None when it is one."""
        if self.state != COMPLETED:
            code = "" if self.exit_code is None else f", exit code {self.exit_code}"
            return f"the job ended as {self.state}{code}"
        if self.silent:
            return 'the script wrote no "final" record'
        speed = self.final.get("images_per_s")
        if not is_number(speed) or speed <= 0:
            return f'the "final" record has images_per_s {speed!r}; expected a number above 0'
        ranks = self.final.get("ranks", self.point.ranks)
        if ranks != self.point.ranks:
            return (
                f"planned for {self.point.ranks} ranks, but the script saw {ranks}: "
                "does it call hvd.init() under the launcher?"
            )
        return None

    def to_line(self) -> bytes:
        """Return the attempt as one line of JSON, its newline included."""
        body = {
            "format": FORMAT,
            "point": vars(self.point),
            "attempt": self.number,
            "state": self.state,
            "exit_code": self.exit_code,
            "provenance": dict(self.provenance),
            "torn_lines": self.torn_lines,
            "records": [dict(r) for r in self.records],
        }
        return (json.dumps(body, ensure_ascii=False) + "\n").encode()


def parse_attempts(text: str) -> tuple[list[Attempt], list[int]]:
    """Read records.jsonl; return its attempts and the numbers (from 1) of lines that are torn."""
    attempts: list[Attempt] = []
    torn: list[int] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
            attempts.append(
                Attempt(
                    point=Point(**body["point"]),
                    number=body["attempt"],
                    state=body["state"],
                    exit_code=body["exit_code"],
                    records=tuple(body["records"]),
                    torn_lines=body["torn_lines"],
                    provenance=body["provenance"],
                )
            )
        except (ValueError, KeyError, TypeError):
            torn.append(number)
    return attempts, torn


def parse_records(text: str) -> tuple[tuple[Mapping[str, Any], ...], int]:
    """Read what a script recorded; return the events and how many lines are no JSON object."""
    records: list[Mapping[str, Any]] = []
    torn = 0
    for line in (ln for ln in text.split("\n") if ln.strip()):
        try:
            body = json.loads(line)
        except ValueError:
            body = None
        if isinstance(body, dict):
            records.append(body)
        else:
            torn += 1
    return tuple(records), torn


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether a recorded value can be computed with: an int or a finite float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def finished(attempts: Iterable[Attempt]) -> dict[str, Attempt]:
    """Return the measurement of each finished point by its key: the first that has no fault."""
    done: dict[str, Attempt] = {}
    for attempt in attempts:
        if attempt.fault is None:
            done.setdefault(attempt.point.key, attempt)
    return done
