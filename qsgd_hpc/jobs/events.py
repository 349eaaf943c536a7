"""Events that jobs write themselves; they complete and correct the answers of schedulers.

Also descriptions of how jobs ended, and the failed nodes and ranks named in a job's output.
"""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from collections import Counter
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from qsgd_hpc.errors import EXIT_RESUBMIT
from qsgd_hpc.jobs.model import Job, JobState, Progress

__all__ = [
    "NOT_MET",
    "NO_MEMORY",
    "PREEMPTED",
    "WALLTIME",
    "end_of",
    "exit_words",
    "last_event_at",
    "node_words",
    "or_stopped",
    "read_events",
    "task_counts",
    "task_progress",
    "why_not_run",
    "with_own_record",
]

CLOCKS_APART_S = 60.0
_ENDED_OUTSIDE = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
NOT_MET = "a job that it waited for did not complete"
NO_MEMORY = (
    "a node ran out of memory: use fewer --ranks-per-node, more --nodes or a smaller batch, or "
    "request more memory"
)
PREEMPTED = (
    "preempted by a job of higher priority: submit it again, or use --requeue to make "
    "the scheduler do so"
)
WALLTIME = "ended at its walltime: use a longer --walltime, or make it stop at a checkpoint"
_REMEDIES = (NO_MEMORY, PREEMPTED)  # more specific than an exit code
SKIPPED_WHY = "nothing was left to do: the part before it had finished the training"


def read_events(directory: Path) -> list[dict[str, Any]]:
    """Return the events in the order of writing, without a truncated line."""
    found = []
    try:
        lines = (directory / "events.jsonl").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            found.append(event)
    return found


def last_event_at(directory: Path) -> float:
    """Return the time of the job's last event, by the file system's clock; 0 without events."""
    try:
        return (directory / "events.jsonl").stat().st_mtime
    except OSError:
        return 0.0


def with_own_record(job: Job, progress: Progress) -> Progress:
    """Return the progress, completed by the job's own events.

    The scheduler's reason is kept for a job that was ended from outside. The events add what the
    scheduler does not know: times, parts of a chain that had nothing to do, the end of a job that
    the scheduler has deleted, and failures that it reports as successes.
    """
    progress = or_stopped(progress)
    if job.scheduler == "local":
        return progress
    if job.request.array:
        return _corrected_array(job, progress)
    runs = _runs(job.directory)
    if not runs:
        return _with_lost_node(job, progress, ())
    at = {event["event"]: event for event in runs[-1]}
    started_at = at.get("start", {}).get("at")
    if _is_end_of_earlier_run(progress, at):
        return job.progress  # the scheduler has restarted the job since
    waiting = progress.state is JobState.QUEUED  # again, after an earlier run
    progress = dataclasses.replace(
        progress,
        started_at=progress.started_at or (None if waiting else started_at),
        restarts=max(progress.restarts, len(runs) - 1),
    )
    if why := why_not_run(job, progress.state, at):
        return dataclasses.replace(progress, why=why)
    progress = _corrected(progress, at["end"]) if "end" in at else progress
    return _with_failed_rank(job, _with_lost_node(job, progress, at), at)


def or_stopped(progress: Progress) -> Progress:
    """Return STOPPED for the exit code by which a script asks for it; schedulers report FAILED."""
    if progress.state is JobState.FAILED and progress.exit_code == EXIT_RESUBMIT:
        return dataclasses.replace(progress, state=JobState.STOPPED)
    return progress


def _is_end_of_earlier_run(progress: Progress, at: Mapping[str, dict[str, Any]]) -> bool:
    """Return whether a scheduler reports the end of a run that preceded the last one.

    Nodes and the scheduler's server may disagree on the time. If the last run has recorded its end,
    too, the scheduler's answer is that end, whatever their clocks show.
    """
    started_at, ended_at = at.get("start", {}).get("at"), progress.ended_at
    if not progress.state.ended or "end" in at or not started_at or not ended_at:
        return False
    return bool(ended_at < started_at - CLOCKS_APART_S)


def _with_lost_node(job: Job, progress: Progress, names: Container[str]) -> Progress:
    """Return the end of a PBS job that lost a node, which its output names.

    The output is read only if the job was ended from outside, because scripts may print such text.
    """
    ended = progress.exit_code in (None, *_ENDED_OUTSIDE) or "terminate" in names
    if job.scheduler != "pbs" or progress.state is not JobState.FAILED or not ended:
        return progress
    if (node := _dead_node(job.log_path)) is None:
        return progress
    return dataclasses.replace(
        progress,
        state=JobState.NODE_FAIL,
        exit_code=None,
        why=node_words((node,)),
        bad_nodes=(node,),
    )


def _with_failed_rank(job: Job, progress: Progress, names: Container[str]) -> Progress:
    """Return the end of a Slurm job, by the rank for which srun ended the others by a signal."""
    ended = progress.exit_code in _ENDED_OUTSIDE and "terminate" not in names
    if job.scheduler != "slurm" or progress.state is not JobState.FAILED or not ended:
        return progress
    if (first := _first_failed_rank(job.log_path)) is None:
        return progress
    return dataclasses.replace(progress, exit_code=first[0], why=first[1])


def _corrected(progress: Progress, end: dict[str, Any]) -> Progress:
    """Return the progress, corrected by the script's own record of its end.

    The recorded exit code is the script's; a scheduler may report that of a shell around it.
    Other causes from the scheduler, such as the walltime or lack of memory, are kept.
    """
    code, at = end.get("exit_code"), end.get("at")
    if not isinstance(code, int):
        return progress
    if progress.started_at and at and at < progress.started_at - CLOCKS_APART_S:
        return progress  # the end of an earlier run; this one has recorded no end
    own = f"the job itself recorded exit code {code}"
    if progress.state is JobState.LOST:
        return _ended_by(progress, code, at)
    if progress.state is JobState.COMPLETED and code != 0:
        new = _ended_by(progress, code, at)
        return dataclasses.replace(new, why=f"{new.why}, though its scheduler reports exit code 0")
    if progress.state is not JobState.FAILED or code == progress.exit_code:
        return progress
    # sacct subtracts 128 from larger exit codes: 15 may be 143, the end by a signal.
    if code == EXIT_RESUBMIT or code - 128 == progress.exit_code:
        return _ended_by(progress, code, at)
    if code == 0 or progress.exit_code is not None:
        return dataclasses.replace(progress, why=f"{progress.why or 'it failed'}; {own}")
    # Slurm without accounting reports a failure without its exit code.
    new = _ended_by(progress, code, at)
    return dataclasses.replace(new, why=progress.why) if progress.why in _REMEDIES else new


def _corrected_array(job: Job, progress: Progress) -> Progress:
    """Return the progress of an array; FAILED if its scheduler missed the failure of a task."""
    if progress.state is not JobState.COMPLETED:
        return progress
    codes = {n: _exit_code(job.task_directory(n)) for n in range(len(job.request.tasks))}
    if not (bad := {n: code for n, code in codes.items() if code}):
        return progress
    first = next(iter(bad))
    why = f"task {first} recorded exit code {bad[first]}, though its scheduler reports 0"
    counts = Counter(end_of(code or 0)[0].value for code in codes.values())
    return dataclasses.replace(
        progress, state=JobState.FAILED, exit_code=bad[first], why=why, tasks=dict(counts)
    )


def _exit_code(directory: Path) -> int | None:
    """Return the exit code recorded by the last run in a directory, or None."""
    runs = _runs(directory)
    code = runs[-1][-1].get("exit_code") if runs else None
    return code if isinstance(code, int) else None


def _runs(directory: Path) -> list[list[dict[str, Any]]]:
    """Return the events of each start of the job; a scheduler may restart it."""
    runs: list[list[dict[str, Any]]] = []
    for event in read_events(directory):
        if event["event"] == "start" or not runs:
            runs.append([])
        runs[-1].append(event)
    return runs


def why_not_run(job: Job, state: JobState, names: Container[str]) -> str | None:
    """Return why a part of a chain did not run its script, from its events."""
    if "skip" in names and state is JobState.COMPLETED:
        return SKIPPED_WHY
    if "refuse" in names and state is JobState.FAILED:
        return f"not run, because {job.previous} failed"
    return None


def _ended_by(progress: Progress, code: int, at: float | None) -> Progress:
    state, why = end_of(code)
    return dataclasses.replace(
        progress, state=state, exit_code=code, why=why, ended_at=progress.ended_at or at
    )


def end_of(exit_code: int) -> tuple[JobState, str]:
    """Return the state and the cause for an exit code of a job script."""
    if exit_code == 0:
        return JobState.COMPLETED, ""
    state = JobState.STOPPED if exit_code == EXIT_RESUBMIT else JobState.FAILED
    return state, exit_words(exit_code)


def task_counts(job: Job) -> dict[str, int]:
    """Return the number of tasks of an array in each state, from their events."""
    states = (task_progress(job, n).state for n in range(len(job.request.tasks)))
    return dict(Counter(state.value for state in states))


def task_progress(job: Job, task: int) -> Progress:
    """Return the progress of a task of an array, from its events."""
    runs = _runs(job.task_directory(task))
    if not runs:
        return Progress()
    first, last = runs[-1][0], runs[-1][-1]
    running = Progress(JobState.RUNNING, started_at=first.get("at"))
    code = last.get("exit_code")
    return _ended_by(running, code, last.get("at")) if isinstance(code, int) else running


def exit_words(code: int) -> str:
    """Return the cause for an exit code of the script; 128 + n stands for signal n."""
    if code == EXIT_RESUBMIT:
        return "it stopped at a checkpoint and asks to be submitted again"
    try:
        return f"ended by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"the script ended with exit code {code}"


def node_words(nodes: tuple[str, ...]) -> str:
    """Return why a job whose nodes failed ended; () if the nodes are unknown."""
    if not nodes:
        return "a node of the job failed"
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)} failed"


TAIL_BYTES = 65_536
# The MoM of the first node detects that another one no longer answers, writes that into the job's
# output and ends the job by SIGTERM. qstat then reports only that a signal ended the script.
# OpenPBS and Torque write "job die" or "job terminate". Code 1000 is a sister's own request to end
# the job, for a limit that it has exceeded on that node.
_DEAD = re.compile(
    r"=>> PBS: job killed: node \d+ \(([^()\s]+)\) requested job (?:die|terminate)\b"
    r"(?!.{0,40}?code 1000\b)"
)
# srun ends the others when one rank has failed (--kill-on-bad-exit), and reports each end.
_BY_SRUN = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+?)\s*$", re.MULTILINE)
_EXITED = re.compile(r"Exited with exit code (\d+)")


def _dead_node(log: Path) -> str | None:
    """Return the failed node that PBS reports at the end of a job's output, or None."""
    found = _DEAD.findall(_tail(log))
    return found[-1] if found else None


def _first_failed_rank(log: Path) -> tuple[int, str] | None:
    """Return exit code and cause of the first failure that srun reports, unless by a signal."""
    first = _BY_SRUN.search(_tail(log))
    code = first and _EXITED.fullmatch(first[3])
    if not first or not code:
        return None
    ranks = f"rank{'' if first[2].isdigit() else 's'} {first[2]}"
    return int(code[1]), f"{ranks} on {first[1]} ended with exit code {code[1]}; see the log"


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
