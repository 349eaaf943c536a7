"""Progress display of a running study: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from qsgd_hpc.jobs import Job, JobState
from qsgd_hpc.scaling import units
from qsgd_hpc.scaling.define.study import Point
from qsgd_hpc.scaling.store import Attempt, throughput

__all__ = ["Progress"]

TAIL_LINES = 12


@dataclass
class _Seen:
    point: Point
    job: Job
    since: float
    adopted: bool
    speed: tuple[float, str] | None = None


@dataclass
class Progress:
    """Shows the events of a study on the terminal.

    Attributes:
        console: the console to write to.
        total: points of the study.
        done: finished points, including those of earlier runs.
        cases: number of cases; with several, a point's name includes its case.
    """

    console: Console
    total: int
    done: int
    cases: int = 1
    _active: dict[str, _Seen] = field(default_factory=dict)
    _took_s: list[float] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _spinner: Spinner = field(default_factory=lambda: Spinner("dots", style="cyan"))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw the bar while the study runs, if the console is a terminal."""
        if not self.console.is_terminal:
            yield
            return
        with Live(
            get_renderable=self._picture, console=self.console, refresh_per_second=8, transient=True
        ):
            yield

    def packed(self, job: Job, points: int, *, adopted: bool) -> None:
        """A job of many points was submitted, or found from an earlier run."""
        verb = "follows" if adopted else "waits for"
        of = " of an earlier run" if adopted else ""
        self._say(Text(f"  {units.count(points, 'point')}: {verb} job {job.id}{of}"))

    def started(self, point: Point, job: Job, *, adopted: bool) -> None:
        """A point's own job was submitted or found again, or it began inside a packed job."""
        self._active[point.key] = _Seen(point, job, time.monotonic(), adopted)
        if adopted:
            self._say(Text(f"  {self._name(point)}: follows job {job.id} of an earlier run"))
        elif not self.console.is_terminal:
            self._say(Text(f"  {self._name(point)}: job {job.id}"))

    def seen(self, point: Point, job: Job, speed: tuple[float, str] | None) -> None:
        """A running point was polled; `speed` is its newest throughput and unit."""
        entry = self._active[point.key]
        if job.state == JobState.RUNNING and entry.job.state == JobState.QUEUED:
            entry.since = time.monotonic()
        entry.job, entry.speed = job, speed

    def ended(self, attempt: Attempt, log: Path) -> None:
        """A point's job, or its part of one, ended; its records are in the collection."""
        point = attempt.point
        entry = self._active.pop(point.key)
        took = attempt.seconds or time.monotonic() - entry.since
        count = f"[{self.done + 1}/{self.total}]"
        if attempt.fault is not None:
            self._say(Text(f"  ✗ {self._name(point)}: {attempt.fault}. Log: {log}", style="red"))
            self._say(Text(_tail(log), style="dim"))
            return
        self.done += 1
        if not entry.adopted:  # when an adopted job began is unknown
            self._took_s.append(took)
        line = Text("  ✓ ", style="green").append(
            f"{count} {self._name(point)}  {units.rate(*throughput(attempt.final))}"
            f"  ({units.duration(took)})",
            style="default",
        )
        self._say(line)

    def _name(self, point: Point) -> str:
        return point.name(self.cases > 1)

    def _say(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)

    def _picture(self) -> Group:
        elapsed = time.monotonic() - self._began
        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self.total, completed=self.done, width=28)
        head.add_row(
            self._spinner,
            bar,
            f"{self.done}/{self.total} points",
            f"elapsed {units.duration(elapsed)}",
            self._eta(),
        )
        lines = [
            Text(
                f"  {self._name(s.point)}  {s.job.state.value.lower()} "
                f"{units.duration(time.monotonic() - s.since)}"
                f"  job {s.job.id}" + (f"  {units.rate(*s.speed)}" if s.speed else "")
            )
            for s in self._active.values()
        ]
        return Group(*lines, head)

    def _eta(self) -> str:
        if not self._took_s:
            return "ETA after the first point"
        mean = sum(self._took_s) / len(self._took_s)
        spent = sum(min(mean, time.monotonic() - s.since) for s in self._active.values())
        left = max(0.0, mean * (self.total - self.done) - spent)
        return f"ETA {units.duration(left)}"


def _tail(log: Path) -> str:
    """Return the end of a job's output, indented."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "    (no output)"
    return "\n".join(f"    {line}" for line in text.splitlines()[-TAIL_LINES:]) or "    (no output)"
