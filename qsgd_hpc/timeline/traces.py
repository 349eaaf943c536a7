"""Trace Event files: read (also truncated ones), merge, and summarise by tensor and by step.

The parts of a step are computing, communicating and waiting.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from qsgd_hpc.errors import UsageError

__all__ = [
    "OTHERS",
    "Event",
    "RankSteps",
    "Summary",
    "TensorTimes",
    "load",
    "merge",
    "of_steps",
    "ranks_of",
    "summarise",
]

Event = dict[str, Any]
Span = tuple[float, float]
"""Begin and end in microseconds."""
OTHERS = -1
"""An unknown rank: only rank 0's events contain which rank submitted a tensor last."""
NOT_TENSORS = ("cycles", "program", "steps")
Rows = dict[str, list[Event]]
"""A rank's events by the name of their row, in temporal order."""


def load(path: Path) -> list[Event]:
    """Return the events of a timeline; the end of a killed process's file may be missing.

    Raises:
        UsageError: the file cannot be read, or is not a timeline.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    try:
        found = json.loads(text)
        events = found["traceEvents"] if isinstance(found, dict) else found
    except (ValueError, KeyError):
        events = [event for line in text.splitlines() if (event := _event(line)) is not None]
    events = [event for event in events if _is_event(event)] if isinstance(events, list) else []
    if not events and text.strip() not in ("", "[", "[\n]"):
        raise UsageError(f"{path} is not a timeline: no line of it is a trace event")
    return events


def _is_event(found: object) -> bool:
    """Whether a value is an event with the fields that are read of its kind."""
    if not isinstance(found, dict) or "ph" not in found:
        return False
    if found["ph"] == "X" and not {"name", "ts", "dur"} <= found.keys():
        return False
    number = (int, float)
    kinds: dict[str, Any] = {"ts": number, "dur": number, "pid": (int, str), "args": dict}
    return all(isinstance(found[key], kind) for key, kind in kinds.items() if key in found)


def _event(line: str) -> Event | None:
    try:
        event = json.loads(line.rstrip(", \n"))
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def merge(paths: Sequence[Path], target: Path) -> int:
    """Write the events of several ranks' files as one; return their number.

    The files' times share an axis if the ranks wrote them together.

    Raises:
        UsageError: two files are of the same rank, one cannot be read, or ``target`` is one of them
            or cannot be written.
    """
    if target.exists() and any(path.exists() and path.samefile(target) for path in paths):
        raise UsageError(f"{target} is one of the files to merge; choose another for the output")
    ranks: dict[int, Path] = {}
    events: list[Event] = []
    for path in paths:
        found = load(path)
        for rank in ranks_of(found):
            if rank in ranks:
                raise UsageError(
                    f"{path} and {ranks[rank]} both belong to rank {rank}; merge files of "
                    "one run only"
                )
            ranks[rank] = path
        events += found
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0)))
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    try:
        target.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror}") from None
    return len(events)


@dataclass
class TensorTimes:
    """Totals of one tensor, over all ranks of a file."""

    operations: int = 0
    elements: int = 0
    """Number of elements in the last operation."""
    wire_bytes: int = 0
    bits: float = 0.0
    """Bits per element in the last operation."""
    negotiating_us: float = 0.0
    queued_us: float = 0.0
    working_us: float = 0.0
    exposed_us: float = 0.0
    """The part of working_us in which the rank's program waited."""


@dataclass
class Summary:
    """A timeline in numbers; times are summed over its ranks."""

    tensors: dict[str, TensorTimes] = field(default_factory=dict)
    ranks: int = 0
    span_us: float = 0.0
    """Time from the first event to the last."""
    waiting_us: float = 0.0
    """Time for which the ranks' programs waited for results."""
    busy_us: float = 0.0
    """Time for which the ranks' engines executed collectives."""


def summarise(events: Sequence[Event]) -> Summary:
    """Return the times of each tensor, and the parts in which the program waited."""
    rows = rows_of(events)
    timed = [event for rank in rows.values() for row in rank.values() for event in row]
    summary = Summary(ranks=len(rows))
    if timed:
        first = min(event["ts"] for event in timed)
        summary.span_us = max(event["ts"] + event.get("dur", 0) for event in timed) - first
    for rank in rows.values():
        waits = union(spans_of(rank.get("program", ())))
        busy: list[Span] = []
        for name, row in rank.items():
            if name not in NOT_TENSORS:
                times = summary.tensors.setdefault(name, TensorTimes())
                busy += _add_row(times, row, waits)
        summary.waiting_us += length(waits)
        summary.busy_us += length(union(busy))
    return summary


def ranks_of(events: Sequence[Event]) -> set[int]:
    """Return the ranks of a file; processes of other programs have another name, or no number."""
    titles = [event for event in events if event.get("name") == "process_name"]
    named = {event.get("pid"): event.get("args", {}).get("name") for event in titles}
    numbers = {pid for event in events if isinstance(pid := event.get("pid"), int)}
    return {pid for pid in numbers if named.get(pid, f"rank {pid}") == f"rank {pid}"}


def rows_of(events: Sequence[Event]) -> dict[int, Rows]:
    """Return the timed events of a file by rank and row."""
    names: dict[tuple[int, int], str] = {}
    by_row: dict[tuple[int, int], list[Event]] = defaultdict(list)
    ranks = ranks_of(events)
    for event in events:
        if event.get("pid") not in ranks or "tid" not in event:
            continue
        key = event["pid"], event["tid"]
        if event["ph"] == "M":
            if event.get("name") == "thread_name":
                names[key] = str(event.get("args", {}).get("name"))
        elif "ts" in event:
            by_row[key].append(event)
    rows: dict[int, Rows] = defaultdict(dict)
    for key, row in by_row.items():
        rows[key[0]][names.get(key, str(key[1]))] = sorted(row, key=itemgetter("ts"))
    return rows


def spans_of(events: Iterable[Event]) -> list[Span]:
    """Return begin and end of the events that have a duration."""
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]


def negotiations_of(row: Iterable[Event]) -> list[tuple[Span, int]]:
    """Return when the ranks negotiated a tensor, and the last rank that submitted it.

    A negotiation contains a mark for every rank that submits the tensor.
    """
    found = []
    begun: float | None = None
    last = OTHERS
    for event in row:
        if event["ph"] == "B":
            begun, last = event["ts"], OTHERS
        elif event["ph"] == "i" and begun is not None:
            last = event["args"]["rank"]
        elif event["ph"] == "E" and begun is not None:
            found.append(((begun, event["ts"]), last))
            begun = None
    return found


def collectives_of(row: Iterable[Event]) -> list[tuple[Span, dict[str, Any]]]:
    """Return when the engine executed a tensor's collectives, with the numbers of each."""
    found = [event for event in row if event["ph"] == "X" and "wire_bytes" in event.get("args", {})]
    return [(span, event["args"]) for span, event in zip(spans_of(found), found, strict=True)]


def _add_row(times: TensorTimes, row: Sequence[Event], waits: Sequence[Span]) -> list[Span]:
    """Add one rank's events of a tensor; return the spans of its operations."""
    collectives = collectives_of(row)
    times.negotiating_us += length(span for span, _ in negotiations_of(row))
    times.queued_us += length(spans_of(e for e in row if e.get("name") == "QUEUE"))
    for span, args in collectives:
        times.operations += 1
        times.elements = args["elements"]
        times.bits = args["bits"]
        times.wire_bytes += args["wire_bytes"]
        times.exposed_us += overlap(span, waits)
    spans = [span for span, _ in collectives]
    times.working_us += length(spans)
    return spans


def union(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint spans, in order, that cover the same times."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def length(disjoint: Iterable[Span]) -> float:
    """Return the total length of disjoint spans."""
    return sum(end - begin for begin, end in disjoint)


def overlap(span: Span, disjoint: Sequence[Span]) -> float:
    """Return the length of the part of ``span`` that disjoint spans, in order, cover."""
    return length(intersection([span], disjoint))


def intersection(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """Return the times that both cover; each is disjoint and in order."""
    common = []
    for begin, end in a:
        for other in b[bisect_left(b, begin, key=lambda s: s[1]) :]:
            if other[0] >= end:
                break
            low, high = max(begin, other[0]), min(end, other[1])
            if low < high:
                common.append((low, high))
    return common


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
