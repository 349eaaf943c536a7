"""Breakdown of training steps into computing, communicating and waiting, from a timeline."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from qsgd_hpc.timeline.traces import (
    NOT_TENSORS,
    OTHERS,
    Event,
    Rows,
    Span,
    collectives_of,
    intersection,
    length,
    negotiations_of,
    overlap,
    rows_of,
    spans_of,
    union,
)

__all__ = ["RankSteps", "of_steps"]


@dataclass
class RankSteps:
    """The steps of one rank; times in microseconds, summed over its steps.

    A step lasts from the submission of its first gradient to that of the next step's. Its parts are
    ``computing_us``, ``absent_us``, ``exposed_us`` and ``agreeing_us``; ``hidden_us`` and
    ``coding_us`` overlap with them.
    """

    rank: int
    durations_us: list[float] = field(default_factory=list)
    computing_us: float = 0.0
    """Time in which the program did not wait for a result."""
    absent_us: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Time in which it waited for other ranks to submit a tensor, by the rank that was last."""
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
        """Return the time of all steps."""
        return sum(self.durations_us)


Negotiations = dict[str, list[tuple[Span, int]]]
"""When the ranks negotiated each tensor, and the last rank that submitted it."""


@dataclass
class _Work:
    """Events of a rank's tensors."""

    collectives: list[Span]
    coding: list[tuple[Span, float]]
    negotiations: Negotiations


def of_steps(events: Sequence[Event]) -> list[RankSteps]:
    """Return the steps of each rank with at least one complete step, in the order of ranks."""
    rows = rows_of(events)
    works = {rank: _work_of(rows[rank]) for rank in sorted(rows)}
    of_rank_0 = works[0].negotiations if 0 in works else {}
    found = []
    for rank, work in works.items():
        named = rows[rank]
        steps = [span for span in spans_of(named.get("steps", ())) if span[1] > span[0]]
        if steps:
            waits = union(spans_of(named.get("program", ())))
            found.append(_of_rank(rank, steps, waits, work, of_rank_0))
    return found


def _of_rank(
    rank: int, steps: Sequence[Span], waits: Sequence[Span], work: _Work, of_rank_0: Negotiations
) -> RankSteps:
    in_steps = union(steps)
    waited = intersection(waits, in_steps)
    exposed = intersection(waited, work.collectives)
    result = RankSteps(rank, [end - begin for begin, end in steps])
    result.computing_us = length(in_steps) - length(waited)
    result.exposed_us = length(exposed)
    result.hidden_us = length(intersection(work.collectives, in_steps)) - result.exposed_us
    idle = _without(waited, exposed)
    for last, spans in _absences(rank, work, of_rank_0).items():
        absent = intersection(idle, union(spans))
        result.absent_us[last] += length(absent)
        idle = _without(idle, absent)
    result.agreeing_us = length(idle)
    result.coding_us = sum(
        coding * overlap(span, in_steps) / (span[1] - span[0]) for span, coding in work.coding
    )
    return result


def _absences(rank: int, work: _Work, of_rank_0: Negotiations) -> dict[int, list[Span]]:
    """Return when this rank waited for another to submit a tensor, by the rank that was last."""
    found: dict[int, list[Span]] = defaultdict(list)
    for tensor, negotiations in work.negotiations.items():
        known = of_rank_0.get(tensor, [])
        for span, marked in negotiations:
            last = marked if rank == 0 else _last_by(known, span[1])
            if last != rank:
                found[last].append(span)
    return found


def _last_by(known: Sequence[tuple[Span, int]], end: float) -> int:
    """Return the last rank of rank 0's negotiation that ended at the time nearest to ``end``."""
    at = bisect_left(known, end, key=lambda each: each[0][1])
    near = known[max(at - 1, 0) : at + 1]
    return min(near, key=lambda each: abs(each[0][1] - end))[1] if near else OTHERS


def _work_of(rows: Rows) -> _Work:
    tensors = {name: row for name, row in rows.items() if name not in NOT_TENSORS}
    done = [each for row in tensors.values() for each in collectives_of(row)]
    return _Work(
        union(span for span, _ in done),
        [(s, args["coding_us"]) for s, args in done if "coding_us" in args and s[1] > s[0]],
        {name: negotiations_of(row) for name, row in tensors.items()},
    )


def _without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """Return ``spans`` minus ``holes``; both are disjoint and in order, and so is the result."""
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
