"""The time of training steps by computing, communicating and waiting, from a timeline."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from qsgd_hpc.timeline.traces import (
    Event,
    Rows,
    Span,
    intersection,
    length,
    overlap,
    rows_of,
    spans_of,
    union,
)

__all__ = ["RankSteps", "of_steps"]

OTHERS = -1
"""Stands for a rank that the file does not tell: only rank 0's part knows who came last."""


@dataclass
class RankSteps:
    """The steps of one rank; times in microseconds, summed over its steps.

    A step lasts from the first gradient that is handed over to that of the next. Its parts are
    ``computing_us``, ``absent_us``, ``exposed_us`` and ``agreeing_us``; what is hidden, and coding,
    run beside them.
    """

    rank: int
    durations_us: list[float] = field(default_factory=list)
    computing_us: float = 0.0
    """Time in which the program did not wait for a result."""
    absent_us: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Time in which it waited for a tensor of another rank, by the last such rank."""
    exposed_us: float = 0.0
    """Time in which it waited while its engine executed collectives."""
    agreeing_us: float = 0.0
    """Time in which it waited for other reasons: negotiation, threads waking up."""
    hidden_us: float = 0.0
    """Time in which its engine executed collectives while the program did not wait."""
    coding_us: float = 0.0
    """Time that its engine spent coding, adding and decoding, hidden or not."""

    @property
    def steps_us(self) -> float:
        """Return what all steps took."""
        return sum(self.durations_us)


@dataclass(frozen=True)
class _Negotiation:
    """Events of one tensor on one rank."""

    span: Span
    last: int


@dataclass
class _Work:
    """Events of a rank's tensors."""

    collectives: list[Span]
    coding: list[tuple[Span, float]]
    negotiations: dict[str, list[_Negotiation]]


def of_steps(events: Iterable[Event]) -> list[RankSteps]:
    """Return the steps of each rank that the file holds whole ones of, in order."""
    rows = rows_of(events)
    works = {rank: _work_of(rows[rank]) for rank in sorted(rows)}
    judge = works[0].negotiations if 0 in works else {}
    found = []
    for rank, work in works.items():
        named = rows[rank]
        steps = [span for span in spans_of(named.get("steps", ())) if span[1] > span[0]]
        if steps:
            waits = union(spans_of(named.get("program", ())))
            found.append(_of_rank(rank, steps, waits, work, judge))
    return found


def _of_rank(
    rank: int,
    steps: Sequence[Span],
    waits: Sequence[Span],
    work: _Work,
    judge: dict[str, list[_Negotiation]],
) -> RankSteps:
    whole = union(steps)
    waited = intersection(waits, whole)
    exposed = intersection(waited, work.collectives)
    told = RankSteps(rank, [end - begin for begin, end in steps])
    told.computing_us = length(whole) - length(waited)
    told.exposed_us = length(exposed)
    told.hidden_us = length(intersection(work.collectives, whole)) - told.exposed_us
    idle = _without(waited, exposed)
    for last, spans in _absences(rank, work, judge).items():
        mine = intersection(idle, union(spans))
        told.absent_us[last] += length(mine)
        idle = _without(idle, mine)
    told.agreeing_us = length(idle)
    told.coding_us = sum(
        coding * overlap(span, whole) / (span[1] - span[0]) for span, coding in work.coding
    )
    return told


def _absences(
    rank: int, work: _Work, judge: dict[str, list[_Negotiation]]
) -> dict[int, list[Span]]:
    """Return when this rank had a tensor that another one had not, by the rank that came last."""
    found: dict[int, list[Span]] = defaultdict(list)
    for tensor, negotiations in work.negotiations.items():
        known = judge.get(tensor, [])
        for each in negotiations:
            last = each.last if rank == 0 else _last_by(known, each.span[1])
            if last != rank:
                found[last].append(each.span)
    return found


def _last_by(known: Sequence[_Negotiation], end: float) -> int:
    """Return who came last, in rank 0's view, to the negotiation that ended nearest to ``end``."""
    at = bisect_left(known, end, key=lambda n: n.span[1])
    near = known[max(at - 1, 0) : at + 1]
    return min(near, key=lambda n: abs(n.span[1] - end)).last if near else OTHERS


def _work_of(rows: Rows) -> _Work:
    work = _Work([], [], {})
    collectives: list[Span] = []
    for name, events in rows.items():
        if name in ("program", "cycles", "steps"):
            continue
        for event in events:
            args = event.get("args", {})
            if event["ph"] == "X" and "wire_bytes" in args:
                span = event["ts"], event["ts"] + event["dur"]
                collectives.append(span)
                if "coding_us" in args and span[1] > span[0]:
                    work.coding.append((span, args["coding_us"]))
        work.negotiations[name] = _negotiations(events)
    work.collectives = union(collectives)
    return work


def _negotiations(row: Sequence[Event]) -> list[_Negotiation]:
    """Return a tensor's negotiations; a mark in them names each rank as it comes."""
    found = []
    begun: float | None = None
    last = OTHERS
    for event in row:
        if event["ph"] == "B":
            begun, last = event["ts"], OTHERS
        elif event["ph"] == "i" and begun is not None:
            last = event["args"]["rank"]
        elif event["ph"] == "E" and begun is not None:
            found.append(_Negotiation((begun, event["ts"]), last))
            begun = None
    return found


def _without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """Return what is left of disjoint spans, in order, without those that are in them."""
    left = []
    for begin, end in spans:
        for hole in holes[bisect_left(holes, begin, key=lambda s: s[1]) :]:
            if hole[0] >= end:
                break
            if hole[0] > begin:
                left.append((begin, hole[0]))
            begin = max(begin, hole[1])
        if begin < end:
            left.append((begin, end))
    return left
