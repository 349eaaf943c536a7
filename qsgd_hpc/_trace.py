"""Trace Event files: read even when cut short, merge, and sum up by tensor."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qsgd_hpc.errors import UsageError

__all__ = ["Summary", "TensorTimes", "load", "merge", "summarise"]

Event = dict[str, Any]
Span = tuple[float, float]
"""Begin and end in microseconds."""


def load(path: Path) -> list[Event]:
    """Return the events of a timeline; the end of a killed process's file may be missing.

    Raises:
        UsageError: the file cannot be read, or is no timeline.
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
    events = [event for event in events if isinstance(event, dict) and "ph" in event]
    if not events and text.strip() not in ("", "[", "[\n]"):
        raise UsageError(f"{path} is not a timeline: no line of it is a trace event")
    return events


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
        UsageError: two files are of the same rank, or one cannot be read.
    """
    ranks: dict[int, Path] = {}
    events: list[Event] = []
    for path in paths:
        found = load(path)
        for rank in {event["pid"] for event in found if "pid" in event}:
            if rank in ranks:
                raise UsageError(
                    f"{path} and {ranks[rank]} are both of rank {rank}; merge files of one run"
                )
            ranks[rank] = path
        events += found
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0)))
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    target.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return len(events)


@dataclass
class TensorTimes:
    """What one tensor took, over all ranks of a file."""

    operations: int = 0
    elements: int = 0
    """Of the last operation."""
    wire_bytes: int = 0
    bits: float = 0.0
    """Per element, of the last operation."""
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
    """From the first event to the last."""
    waiting_us: float = 0.0
    """That the ranks' programs waited for results: the communication that training feels."""
    busy_us: float = 0.0
    """That the ranks' engines were in collectives."""


def summarise(events: Iterable[Event]) -> Summary:
    """Return what each tensor took, and how much of it the program had to wait for."""
    events = [event for event in events if "pid" in event and "tid" in event]
    rows: dict[tuple[int, int], str] = {}
    by_row: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        key = event["pid"], event["tid"]
        if event["ph"] == "M":
            if event.get("name") == "thread_name":
                rows[key] = event["args"]["name"]
        elif "ts" in event:
            by_row[key].append(event)
    timed = [event for row in by_row.values() for event in row]
    summary = Summary(ranks=len({event["pid"] for event in timed}))
    if timed:
        first = min(event["ts"] for event in timed)
        summary.span_us = max(event["ts"] + event.get("dur", 0) for event in timed) - first
    waits = {pid: _union(_spans(by_row.get((pid, _waits(rows, pid)), []))) for pid, _ in by_row}
    busy: dict[int, list[Span]] = defaultdict(list)
    for (pid, tid), row in by_row.items():
        name = rows.get((pid, tid), str(tid))
        if name in NOT_TENSORS:
            continue
        times = summary.tensors.setdefault(name, TensorTimes())
        busy[pid] += _add_row(times, sorted(row, key=_by_time), waits[pid])
    summary.waiting_us = sum(end - begin for spans in waits.values() for begin, end in spans)
    summary.busy_us = sum(end - begin for spans in busy.values() for begin, end in _union(spans))
    return summary


NOT_TENSORS = ("cycles", "program")


def _by_time(event: Event) -> float:
    return float(event["ts"])


def _waits(rows: dict[tuple[int, int], str], pid: int) -> int:
    """Return the row in which a rank's program waits, or -1."""
    return next((tid for (p, tid), name in rows.items() if p == pid and name == "program"), -1)


def _spans(events: Iterable[Event]) -> list[Span]:
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]


def _add_row(times: TensorTimes, row: Sequence[Event], waits: Sequence[Span]) -> list[Span]:
    """Add one rank's events of a tensor; return when its operations were carried out."""
    spans = []
    begun: float | None = None
    for event in row:
        args = event.get("args", {})
        if event["ph"] == "B":
            begun = event["ts"]
        elif event["ph"] == "E" and begun is not None:
            times.negotiating_us += event["ts"] - begun
            begun = None
        elif event["ph"] == "X" and event["name"] == "QUEUE":
            times.queued_us += event["dur"]
        elif event["ph"] == "X" and "wire_bytes" in args:
            span = event["ts"], event["ts"] + event["dur"]
            spans.append(span)
            times.operations += 1
            times.elements = args["elements"]
            times.bits = args["bits"]
            times.wire_bytes += args["wire_bytes"]
            times.working_us += event["dur"]
            times.exposed_us += _overlap(span, waits)
    return spans


def _union(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint spans, in order, that cover the same times."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _overlap(span: Span, disjoint: Sequence[Span]) -> float:
    """Return how much of a span lies in spans that are in order."""
    covered = 0.0
    for begin, end in disjoint[bisect_left(disjoint, span[0], key=lambda s: s[1]) :]:
        if begin >= span[1]:
            break
        covered += min(span[1], end) - max(span[0], begin)
    return covered
