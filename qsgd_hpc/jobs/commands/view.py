"""Views of jobs, as text and as JSON, and tables for terminals of any width."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qsgd_hpc.jobs.model import Job, JobState
from qsgd_hpc.jobs.words import clock, plural

__all__ = [
    "Column",
    "as_json",
    "as_json_option",
    "fitting_table",
    "has_output",
    "log_words",
    "next_step",
    "no_output_words",
    "screen",
    "silence_words",
    "status_lines",
    "submitted_lines",
    "table",
]

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")

_COLOURS = {
    JobState.QUEUED: "yellow",
    JobState.RUNNING: "cyan",
    JobState.COMPLETED: "green",
    JobState.STOPPED: "blue",
    JobState.CANCELLED: "magenta",
}


def as_json(job: Job) -> dict[str, Any]:
    """Return a job for --json; times are seconds since the epoch, absent values are null."""
    request, progress = job.request, job.progress
    return {
        "id": job.id,
        "name": job.name,
        "site": job.site,
        "state": job.state.value,
        "exit_code": job.exit_code,
        "why": progress.why,
        "nodes": request.nodes,
        "network": request.network,
        "ranks": request.ranks,
        "walltime_min": request.walltime_min,
        "queue": request.queue,
        "scheduler_id": progress.scheduler_id,
        "known_at": job.known_at,
        "silence": progress.silence,
        "tasks": dict(progress.tasks),
        "restarts": progress.restarts,
        "bad_nodes": list(progress.bad_nodes),
        "previous": job.previous,
        "resumes": job.resumes,
        "submitted_at": job.submitted_at,
        "started_at": progress.started_at,
        "ended_at": progress.ended_at,
        "directory": str(job.directory),
        "script": str(job.script_path),
        "log": log_words(job),
    }


def submitted_lines(jobs: Sequence[Job], *, is_new: bool = True) -> list[str]:
    """Return the output of ``submit``: one job, or the parts of a chain.

    Args:
        jobs: the job, or the parts of a chain in their order.
        is_new: false if an earlier submission with the same key has created them.
    """
    first, *following = jobs
    parts = f", then {', '.join(job.id for job in following)}" if following else ""
    count = f" as an array of {len(first.request.tasks)}" if first.request.array else ""
    task = " --task 0" if first.request.array else ""
    submitted = f"{first.id}{parts} submitted to {first.site}{count}"
    return [
        submitted if is_new else f"{first.id}{parts} has this key already; nothing was submitted",
        f"  script  {first.script_path}",
        f"  follow  qsgd-hpc logs -f {first.id}{task}",
        f"  state   qsgd-hpc status {first.id}",
        f"  end it  qsgd-hpc cancel {first.id}",
    ]


def next_step(job: Job, continued_by: Job | None = None) -> str:
    """Return the most likely next command."""
    if continued_by is not None and _continues(job, continued_by):
        return f"qsgd-hpc status {continued_by.id} (it continues this job)"
    if job.state in (JobState.STOPPED, JobState.NODE_FAIL):
        return f"qsgd-hpc resubmit {job.id}"
    if job.request.array:
        return f"qsgd-hpc logs --task 0 {job.id}"
    if job.state is JobState.QUEUED:
        return f"qsgd-hpc wait {job.id}"
    if job.state is JobState.RUNNING:
        return f"qsgd-hpc logs -f {job.id}"
    return f"qsgd-hpc logs {job.id}"


def _continues(job: Job, after: Job) -> bool:
    """Return whether a later job continues the training.

    The next part of a chain does not continue after COMPLETED and FAILED.
    """
    return after.previous != job.id or job.state not in (JobState.COMPLETED, JobState.FAILED)


def no_output_words(job: Job, path: Path) -> str:
    """Return why a file has no output, and whether it may get some."""
    if not job.state.final:
        return f"{job.id} is {job.state.value}: no output yet"
    why = f" ({job.progress.why})" if job.progress.why else ""
    if job.progress.started_at is None and job.exit_code is None:
        end = "it never started, so there is no output and will be none"
    else:
        end = f"there is no output: {path} does not exist"
    return f"{job.id} is {job.state.value}{why}: {end}"


def log_words(job: Job) -> str:
    """Return the path of the output; TASK stands for the number of an array's task."""
    return str(job.log_path_of("TASK"))


def has_output(job: Job) -> bool:
    """Return whether a job, or a task of an array, has written output."""
    return any(job.directory.glob(job.log_path_of("*").name))


def status_lines(job: Job, continued_by: Job | None = None) -> list[str]:
    """Return the output of ``status``."""
    request, progress = job.request, job.progress
    size = f"{plural(request.nodes, 'node')}, {plural(request.ranks, 'rank')}"
    if request.network is not None:
        size += f", network {request.network}"
    limit = "no walltime" if request.walltime_min is None else clock(request.walltime_min)
    started = "" if progress.started_at is None else _stamp(progress.started_at)
    ran, restarts = _ran(job), progress.restarts
    rows = (
        ("state", job.state.value + (f" ({progress.why})" if progress.why else "")),
        ("known", silence_words(job)),
        ("exit code", "" if job.exit_code is None else str(job.exit_code)),
        ("scheduler id", progress.scheduler_id),
        ("tasks", ", ".join(f"{count} {state}" for state, count in progress.tasks.items())),
        ("continues", job.previous or job.resumes),
        ("restarted", restarts and f"{plural(restarts, 'time')} by the scheduler"),
        ("size", f"{size}, {limit}" + (f", {request.queue}" if request.queue else "")),
        ("submitted", _stamp(job.submitted_at)),
        ("started", f"{started}, ran {ran}" if ran else started),
        ("script", str(job.script_path)),
        ("log", log_words(job)),
        ("next", next_step(job, continued_by)),
    )
    return [f"{job.id}  {job.name}", *(f"  {label:<13}{text}" for label, text in rows if text)]


def _stamp(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def silence_words(job: Job) -> str:
    """Return the time of a state and why there is no newer one; empty if the state is current."""
    if not job.progress.silence:
        return ""
    at = "its submission" if job.known_at is None else _stamp(job.known_at)
    return f"as of {at}; {job.progress.silence}"


def _ran(job: Job) -> str:
    """Return how long the job ran or has run; empty if unknown."""
    started_at, ended_at = job.progress.started_at, job.progress.ended_at
    if ended_at is None and not job.state.ended:
        ended_at = job.known_at if job.progress.silence else time.time()
    if started_at is None or ended_at is None:
        return ""
    return clock(round(max(0.0, ended_at - started_at)) / 60)


GAP = 2
FILE_WIDTH = 200


def screen() -> Console:
    """Return the console: as wide as the terminal, or wide if there is none."""
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        least: the least width in terminal columns; None: it cannot be shortened.
        value: columns with the least value are omitted first; None: never.
        wraps: whether it is wrapped instead of truncated.
        right: whether it is right-aligned, for numbers.
    """

    title: str
    least: int | None = None
    value: int | None = None
    wraps: bool = False
    right: bool = False


def fitting_table(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int) -> Table:
    """Return a table with at most this width in terminal columns.

    Columns are shortened, from the last to the first; if that is not enough, columns are omitted,
    and the remaining ones are wrapped.
    """
    full, least = {}, {}
    for i, column in enumerate(columns):
        full[i] = max([Text(column.title).cell_len, *(row[i].cell_len for row in rows)])
        least[i] = full[i] if column.least is None else min(column.least, full[i])
    shown = list(full)
    while sum(least[i] + GAP for i in shown) - GAP > width:
        optional = [i for i in shown if columns[i].value is not None]
        if not optional:
            break
        shown.remove(min(optional, key=lambda i: columns[i].value or 0))
    over = sum(full[i] + GAP for i in shown) - GAP - width
    given = {}
    for i in reversed(shown):
        given[i] = full[i] - min(max(0, over), full[i] - least[i])
        over -= full[i] - given[i]
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for i in shown:
        table.add_column(
            columns[i].title,
            justify="right" if columns[i].right else "left",
            width=None if over > 0 else given[i],
            no_wrap=over <= 0 and not columns[i].wraps,
            overflow="ellipsis" if over <= 0 else "fold",
        )
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table


_COLUMNS = (
    Column("job"),
    Column("name", least=10),
    Column("state"),
    Column("exit", right=True),
    Column("nodes", value=3, right=True),
    Column("ranks", value=1, right=True),
    Column("submitted", value=4),
    Column("ran", value=2),
    Column("why", least=16, value=5),
)


def table(jobs: Iterable[Job], width: int) -> Table:
    """Return the table that ``list`` prints, for a terminal of this width.

    One line for each job; ``status`` and --json show all of it. The reason is shortened first; job,
    name, state and exit code are never omitted.
    """
    return fitting_table(_COLUMNS, [_row(job) for job in jobs], width)


def _row(job: Job) -> tuple[Text, ...]:
    request, progress = job.request, job.progress
    return (
        Text(job.id),
        Text(job.name),
        Text(job.state.value, _COLOURS.get(job.state, "red")),
        Text("" if job.exit_code is None else str(job.exit_code)),
        Text(str(request.nodes)),
        Text(str(request.ranks)),
        Text(time.strftime("%m-%d %H:%M:%S", time.localtime(job.submitted_at))),
        Text(_ran(job)),
        Text(" ".join((silence_words(job) or progress.why).split())),
    )
