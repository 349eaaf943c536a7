"""The step times of one rank, and their parts."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qsgd_hpc.recording.engine_record import warmup_steps

__all__ = ["COUNTERS", "WARMUP_RULE", "StepLog", "Waits", "breakdown", "mean_over_ranks"]

WARMUP_RULE = "the first 10 steps, or the first half of a run shorter than 20, are not timed"

COUNTERS = {
    "wait_s": "wait_time_s",
    "comm_s": "comm_time_s",
    "coding_s": "coding_time_s",
    "wire_bytes": "wire_bytes",
    "gradient_bytes": "gradient_bytes",
    "fused_reductions": "fused_reductions",
}
"""Counters of the engine that are logged for each step."""

_PARTS = (
    "step_s", "step_mean_s", "compute_s", "exposed_s", "data_s", "hidden_s", "coding_s", "comm_s",
    "step_jitter",
)  # fmt: skip


class StepLog:
    """Per step: its duration, its wait for data, and the increase of each of COUNTERS."""

    def __init__(self) -> None:
        self._columns = {name: array("d") for name in ("seconds", "data_s", *COUNTERS)}
        self._counters = [(self._columns[name], source) for name, source in COUNTERS.items()]

    def __len__(self) -> int:
        return len(self._columns["seconds"])

    def add(
        self, step_s: float, data_s: float, before: Mapping[str, float], after: Mapping[str, float]
    ) -> None:
        """Add a step: its seconds, its seconds of waiting for data, the counters around it."""
        for values, source in self._counters:
            values.append(after[source] - before[source])
        self._columns["data_s"].append(data_s)
        self._columns["seconds"].append(step_s)

    def column(self, name: str, first: int = 0) -> array[float]:
        """Return one number for each step, beginning with step ``first``."""
        return self._columns[name][first:]

    def total(self, name: str, first: int = 0) -> float:
        """Return the sum over the steps, beginning with step ``first``."""
        return sum(self.column(name, first))


@dataclass(frozen=True)
class Waits:
    """The data from which the exposed communication of steps is computed.

    Attributes:
        ranks: number of ranks; with 1, nothing is exposed.
        seen: whether a thread of the program waits for gradients, so that the engine measures it.
        compute_s: seconds of steps without communication, if ``seen`` is False: exposed is then a
            step's duration minus their mean and its wait for data.
    """

    ranks: int
    seen: bool = True
    compute_s: Sequence[float] = ()

    def exposed(self, log: StepLog, first: int) -> list[float] | None:
        """Return the exposed seconds of each step, beginning with ``first``; None if unknown.

        Computed from the mean of ``compute_s``, they may be negative for a single step.
        """
        if self.ranks == 1:
            return [0.0] * (len(log) - first)
        if self.compute_s:
            alone = statistics.fmean(self.compute_s)
            pairs = zip(log.column("seconds", first), log.column("data_s", first), strict=True)
            return [step_s - data_s - alone for step_s, data_s in pairs]
        return list(log.column("wait_s", first)) if self.seen else None

    def raw(self, log: StepLog, first: int) -> dict[str, list[float] | None]:
        """Return the seconds of every step, beginning with ``first``, to 6 digits."""
        names = ("seconds", "data_s", "comm_s", "coding_s")
        columns = {name: _six_digits(log.column(name, first)) for name in names}
        exposed = self.exposed(log, first)
        return {**columns, "exposed_s": None if exposed is None else _six_digits(exposed)}


def breakdown(log: StepLog, waits: Waits) -> dict[str, float | None]:
    """Return means per timed step; compute, exposed and data add up to the step.

    Returns:
        step_s (the median), step_mean_s, compute_s, exposed_s, data_s, hidden_s (communication
        that overlapped with computing), coding_s, comm_s, and step_jitter: the standard deviation
        of the computing time, over its mean. None if there was no step, and for values that depend
        on waits if these are unknown.
    """
    first = warmup_steps(len(log))
    parts: dict[str, float | None] = dict.fromkeys(_PARTS)
    if len(log) == 0:
        return parts
    steps, data = log.column("seconds", first), log.column("data_s", first)
    step_mean_s, data_s = statistics.fmean(steps), statistics.fmean(data)
    comm_s = statistics.fmean(log.column("comm_s", first))
    parts |= {
        "step_s": statistics.median(steps),
        "step_mean_s": step_mean_s,
        "data_s": data_s,
        "coding_s": statistics.fmean(log.column("coding_s", first)),
        "comm_s": comm_s,
    }
    exposed = waits.exposed(log, first)
    if exposed is None:
        return parts
    # Steps measured without communication may have been longer than those of the training.
    exposed_s = max(0.0, statistics.fmean(exposed))
    alone = waits.compute_s if waits.ranks > 1 else ()
    computing = alone or [s - d - e for s, d, e in zip(steps, data, exposed, strict=True)]
    return parts | {
        "compute_s": step_mean_s - data_s - exposed_s,
        "exposed_s": exposed_s,
        "hidden_s": max(0.0, comm_s - exposed_s) if waits.ranks > 1 else 0.0,
        "step_jitter": _spread(computing),
    }


def mean_over_ranks(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of every number over the ranks that have one; None if none has."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, []).extend([] if value is None else [float(value)])
    return {name: statistics.fmean(each) if each else None for name, each in found.items()}


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation over the mean; 0 if there are too few values."""
    mean = statistics.fmean(values)
    return statistics.stdev(values) / mean if len(values) > 1 and mean > 0 else 0.0


def _six_digits(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
