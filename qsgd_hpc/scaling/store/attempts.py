"""One attempt at a point, as stored in the study's records.jsonl, and its speed; pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeGuard

from qsgd_hpc.launch.cluster.network import NONE
from qsgd_hpc.recording.records import RESERVED
from qsgd_hpc.scaling.define.plan import Point

__all__ = [
    "RECORD_HINT",
    "Attempt",
    "finished",
    "is_number",
    "parse_attempts",
    "parse_records",
    "throughput",
]

FORMAT = 2
COMPLETED = "COMPLETED"
MOST = 1e15  # no speed or time is larger; axes of larger numbers cannot be drawn
RECORD_HINT = (
    "A script that trains with qsgd_hpc is measured without a change. To any other script, add "
    "one line at the end, and `from qsgd_hpc.scaling import record` at the top:\n  if "
    'hvd.rank() == 0: record("final", ranks=hvd.size(), throughput=..., unit="images")'
)

# Means over the timed steps of a rank; a run's value is their mean over the ranks.
_MEANS = (
    *("step_s", "step_mean_s", "exposed_s", "hidden_s", "coding_s"),
    *("comm_s", "comm_time_s", "fused_reductions", "nmse"),
)
# Measured times; those left over after others, such as exposed_s, may be slightly below 0.
_TIMES = ("step_s", "step_mean_s", "coding_s", "comm_s", "comm_time_s", "data_s")
_SUMS = ("wire_bytes", "gradient_bytes")
_FIRST = ("steps", "warmup_steps", "warmup_rule", "layers", "backward_s")


@dataclass(frozen=True)
class Attempt:
    """An ended job with the unchanged records of its script and their provenance.

    Attributes:
        state: final state of the job, or of the part of it that measured this point.
        global_batch: samples of all ranks in a step, as the study requested.
    """

    point: Point
    number: int
    state: str
    exit_code: int | None
    records: tuple[Mapping[str, Any], ...] = ()
    torn_lines: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict)
    global_batch: int | None = None

    @cached_property
    def final(self) -> Mapping[str, Any]:
        """The last "final" record, else one computed from "engine" records, else an empty one."""
        own = next((r for r in reversed(self.records) if r.get("event") == "final"), None)
        if own and self.global_batch:
            speed, unit = throughput(own)
            if unit == "steps" and is_number(speed):  # a Meter without a batch; the study knows it
                return {**own, "throughput": speed * self.global_batch, "unit": "samples"}
        return own or _final_of_engines(self.engines, self.global_batch)

    @property
    def engines(self) -> Mapping[Any, Mapping[str, Any]]:
        """The last "engine" record of each rank, by its number."""
        return {r.get("rank"): r for r in self.records if r.get("event") == "engine"}

    @property
    def network(self) -> Mapping[str, Any]:
        """The launcher's records of an emulated network; empty without one."""
        return next((r for r in reversed(self.records) if r.get("event") == "network"), {})

    @property
    def seconds(self) -> float | None:
        """Time for which its nodes were allocated; None if unknown."""
        value = self.provenance.get("seconds")
        return float(value) if is_number(value) else None

    @property
    def held_nodes(self) -> int:
        """Nodes that its job had: in a packed job, possibly more than the point's own."""
        return int(self.provenance.get("held_nodes", self.point.nodes))

    @property
    def epochs(self) -> tuple[Mapping[str, Any], ...]:
        """The "epoch" records in the order in which they were written."""
        return tuple(r for r in self.records if r.get("event") == "epoch")

    @property
    def silent(self) -> bool:
        """Whether the script succeeded without a record of its result."""
        return self.state == COMPLETED and not self.final

    @property
    def fault(self) -> str | None:
        """The reason why this attempt is no measurement, as text; None if it is one."""
        if self.state != COMPLETED:
            code = "" if self.exit_code is None else f", exit code {self.exit_code}"
            return f"the job ended as {self.state}{code}"
        if self.silent:
            return 'there is no "final" record, and no record of the engine for every rank'
        speed, _ = throughput(self.final)
        if not is_number(speed) or not 0 < speed <= MOST:
            old = "images_per_s" in self.final and "throughput" not in self.final
            name = "images_per_s" if old else "throughput"
            above = f"above 0, up to {MOST:g}"
            return f'the "final" record has {name} {speed!r}; expected a number {above}'
        for name in _TIMES:
            if is_number(value := self.final.get(name)) and not 0 <= value <= MOST:
                return f'the "final" record has {name} {value!r}; expected seconds from 0 on'
        ranks = self.final.get("ranks", self.point.ranks)
        if ranks != self.point.ranks:
            return (
                f"planned for {self.point.ranks} ranks, but the script saw {ranks}: "
                "does it call hvd.init() under the launcher?"
            )
        wanted = self.point.case.network
        if wanted not in ("", NONE) and self.point.nodes > 1:
            found = self.network.get("network", "the machine's own memory")
            if found != wanted:
                return f"planned for a network of {wanted}, but the ranks ran on {found}"
        return None

    def to_line(self) -> bytes:
        """Return the attempt as one line of JSON, its newline included."""
        body = {
            "format": FORMAT,
            "point": self.point.to_json(),
            "attempt": self.number,
            "state": self.state,
            "exit_code": self.exit_code,
            "global_batch": self.global_batch,
            "provenance": dict(self.provenance),
            "torn_lines": self.torn_lines,
            "records": [dict(r) for r in self.records],
        }
        return (json.dumps(body, ensure_ascii=False) + "\n").encode()


def parse_attempts(text: str) -> tuple[list[Attempt], list[int]]:
    """Read records.jsonl; return its attempts and the numbers (from 1) of unreadable lines."""
    attempts: list[Attempt] = []
    torn: list[int] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            body = _object(json.loads(line))
            if body.get("format", FORMAT) > FORMAT:
                raise ValueError(body["format"])
            attempts.append(
                Attempt(
                    point=Point.from_json(body["point"]),
                    number=body["attempt"],
                    state=body["state"],
                    exit_code=body["exit_code"],
                    records=tuple(_event(record) for record in body["records"]),
                    torn_lines=body["torn_lines"],
                    provenance=_object(body["provenance"]),
                    global_batch=body.get("global_batch"),
                )
            )
        except (ValueError, KeyError, TypeError):
            torn.append(number)
    return attempts, torn


def _event(value: Any) -> Mapping[str, Any]:
    record = _object(value)
    _object(record.get("place") or {})
    return record


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"not an object: {value!r}")
    return value


def parse_records(text: str) -> tuple[tuple[Mapping[str, Any], ...], int]:
    """Read a script's records; return the events and the number of lines that are not JSON."""
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


def finished(attempts: Iterable[Attempt]) -> dict[str, Attempt]:
    """Return the measurement of each finished point by its key: its first attempt without fault."""
    done: dict[str, Attempt] = {}
    for attempt in attempts:
        if attempt.fault is None:
            done.setdefault(attempt.point.key, attempt)
    return done


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a recorded value can be computed with: a number that a finite float holds."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def throughput(record: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the recorded throughput, unchecked, and the unit that it counts.

    Older scripts record a throughput in images as ``images_per_s``.
    """
    if "throughput" in record:
        return record["throughput"], str(record.get("unit") or "samples")
    return record.get("images_per_s"), "images"


def _final_of_engines(
    ranks: Mapping[Any, Mapping[str, Any]], global_batch: int | None
) -> dict[str, Any]:
    """Make a "final" record from the "engine" records of all ranks; empty if one is missing.

    Throughput is the global batch divided by the median step time of the slowest rank, or steps per
    second if the batch is unknown. The mean is not used: the engine does not see epochs, so a test
    between two of them is part of a step. Values that the engine cannot measure, such as the wait
    for data and the accuracy, stay absent.
    """
    first = ranks.get(0)
    if first is None or set(ranks) != set(range(first.get("ranks", 0))):
        return {}
    own = [ranks[rank] for rank in sorted(ranks)]
    steps = [r.get("step_s") for r in own]
    if not all(is_number(s) and s > 0 for s in steps):
        return {}
    count, unit = (1, "steps") if global_batch is None else (global_batch, "samples")
    means = {name: _mean([r.get(name) for r in own]) for name in _MEANS}
    sums = {name: _sum([r.get(name) for r in own]) for name in _SUMS}
    return {
        "event": "final",
        "source": "engine",
        "ranks": len(own),
        "throughput": count / max(s for s in steps if s is not None),
        "unit": unit,
        **means,
        **sums,
        **{name: first[name] for name in (*_FIRST, *RESERVED) if name in first},
        "global_batch_size": global_batch,
        "hosts": list(dict.fromkeys(r["host"] for r in own if "host" in r)),
    }


def _mean(values: Sequence[Any]) -> float | None:
    """Return the mean of the numbers among values: a rank that compressed nothing has no nmse."""
    numbers = [v for v in values if is_number(v)]
    return sum(numbers) / len(numbers) if numbers else None


def _sum(values: Sequence[Any]) -> float | None:
    return sum(values) if values and all(is_number(v) for v in values) else None
