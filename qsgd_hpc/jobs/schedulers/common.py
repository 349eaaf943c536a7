"""Shared by the schedulers: run a command and read its output, and make a job's progress of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from qsgd_hpc._notices import tell
from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs.events import or_stopped, task_progress
from qsgd_hpc.jobs.model import Job, JobState, Progress
from qsgd_hpc.jobs.registry import write_file

__all__ = [
    "Answer",
    "Dependency",
    "UnconfirmedError",
    "aggregate",
    "ask",
    "batches",
    "condition",
    "epoch_s",
    "is_settled",
    "left_out",
    "mark",
    "merged",
    "no_answer",
    "not_cancelled",
    "of_kind",
    "refusal",
    "run_cancel",
    "silent",
    "submitted",
    "unclear",
    "unconfirmed",
    "unknown",
]

TIMEOUT_S = 60.0
QUIET_S = 5.0  # without an answer for so long, the user is informed
HUNG = 124
# Far below the kernel's limit for one argument (128 KiB), and a small answer for a scheduler.
IDS_AT_ONCE = 1000

# After these errors, the job may be queued: the scheduler may have received the command.
_UNCONFIRMED = (
    "Socket timed out",
    "Zero Bytes were transmitted or received",
    "Transport endpoint is not connected",
    "Communication failure",
    "End of File",
    "Connection reset",
)
# The user's filters, formats and clusters must not change the output of a query.
_STRIPPED = (
    *("SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SLURM_TIME_FORMAT", "LSB_BJOBS_"),
    *("SLURM_CLUSTERS", "SBATCH_CLUSTERS"),
)


class UnconfirmedError(LaunchError):
    """The scheduler did not confirm the job."""


@dataclass(frozen=True)
class Dependency:
    """A job of the same scheduler that must end first: ``ok`` successfully, ``any`` in any way."""

    kind: Literal["ok", "any"]
    scheduler_id: str


@dataclass(frozen=True)
class Answer:
    """The output of a command, and its exit code (127: the command does not exist)."""

    out: str
    err: str = ""
    code: int = 0

    @property
    def said(self) -> str:
        """The error message, else the output, in one line."""
        return " ".join((self.err or self.out).split()) or f"exit code {self.code}"

    @property
    def message(self) -> str:
        """The beginning of what the command said."""
        return self.said[:300]


def ask(
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    stdin: Path | None = None,
    without: Collection[str] = (),
) -> Answer:
    """Run a command and return its output; also if it does not exist or hangs (exit code 124).

    ``without``: variables that the command does not get.
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(_STRIPPED) and key not in without
    }
    try:
        with (stdin or Path(os.devnull)).open("rb") as source:
            process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=kept,
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in the terminal must not end half a submission
            )
    except OSError as error:
        return Answer("", f"{argv[0]}: {error.strerror}", 127)
    with process:
        try:
            out, err = _output(process, argv[0])
        except subprocess.TimeoutExpired:
            return Answer("", f"{argv[0]}: no answer within {TIMEOUT_S:g} s", HUNG)
        finally:
            if process.poll() is None:  # its children, too: sites wrap these commands
                os.killpg(process.pid, signal.SIGKILL)
    return Answer(
        out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), process.returncode
    )


def _output(process: subprocess.Popen[bytes], name: str) -> tuple[bytes, bytes]:
    """Wait for a command's output; inform the user of a longer wait."""
    try:
        return process.communicate(timeout=min(QUIET_S, TIMEOUT_S))
    except subprocess.TimeoutExpired:
        tell(f"waiting for {name}, at most {TIMEOUT_S:g} s (no answer for {QUIET_S:g} s)")
    return process.communicate(timeout=max(0.0, TIMEOUT_S - QUIET_S))


def batches(ids: Iterable[str]) -> list[list[str]]:
    """Split ids into lists that fit on a command line."""
    listed = list(ids)
    return [listed[i : i + IDS_AT_ONCE] for i in range(0, len(listed), IDS_AT_ONCE)]


def epoch_s(text: str, form: str) -> float | None:
    """Return the seconds since the epoch of a local time; None if the text is no such time."""
    try:
        return time.mktime(time.strptime(text, form))
    except (ValueError, OverflowError):
        return None


def of_kind(after: Iterable[Dependency], kind: str) -> list[str]:
    """Return the scheduler's ids of the dependencies of one kind."""
    return [dependency.scheduler_id for dependency in after if dependency.kind == kind]


def condition(after: Sequence[Dependency]) -> str:
    """Return the dependencies as PBS and Slurm read them: ``afterok:41:42,afterany:43``."""
    ids = {kind: of_kind(after, kind) for kind in ("ok", "any")}
    return ",".join(f"after{kind}:{':'.join(each)}" for kind, each in ids.items() if each)


def mark(directory: Path) -> str:
    """Return a word that uniquely identifies the job of a directory, over all registries.

    It has only characters that are allowed in a directive.
    """
    registry = hashlib.sha256(os.fsencode(directory.parent)).hexdigest()[:8]
    return f"qsgd-hpc:{directory.name}@{registry}"


def submitted(
    job: Job, job_id: str | None, error: LaunchError, find: Callable[[Job], str | None]
) -> Progress:
    """Return the first progress of a job; without an id, look for it before raising ``error``."""
    if job_id is None and isinstance(error, UnconfirmedError):
        with contextlib.suppress(LaunchError):
            job_id = find(job)
    if job_id is None:
        raise error
    return replace(job.progress, scheduler_id=job_id)


def refusal(command: str, answer: Answer, remedies: Iterable[tuple[str, str]]) -> LaunchError:
    """Turn a refusal into an error that quotes the scheduler and adds the remedy, if known."""
    # It was killed, or it succeeded without a readable id.
    vague = answer.code in (0, HUNG) or answer.code < 0
    if vague or any(words in answer.err for words in _UNCONFIRMED):
        return UnconfirmedError(
            f"{command} did not confirm the job: {answer.message}. It may have been submitted. "
            "`qsgd-hpc list` searches for it; wait for the result before you submit it again."
        )
    advice = next((text for words, text in remedies if words in answer.said), "")
    return LaunchError(f"{command} refused the job: {answer.said}\n{advice}".rstrip())


def no_answer(command: str, answer: Answer) -> LaunchError:
    """Return the error for a query without an answer."""
    return LaunchError(f"{command} does not answer: {answer.message}. Try again later.")


def run_cancel(argv: Sequence[str], harmless: Iterable[str]) -> None:
    """Run a command that ends a job, which may have ended: its ``harmless`` errors say so.

    Raises:
        LaunchError: any other error; the job is, or may be, still alive.
    """
    answer = ask(argv)
    said = answer.out + answer.err
    if answer.code != 0 and not any(words in said for words in harmless):
        raise not_cancelled(argv[0], answer)


def not_cancelled(command: str, answer: Answer) -> LaunchError:
    """Return the error for a job that is, or may be, still alive."""
    if answer.code == HUNG:
        return LaunchError(f"{answer.message}; the scheduler may or may not have received it.")
    return LaunchError(f"{command} did not end the job: {answer.message}. Nothing was cancelled.")


UNREAD_FILE = "unread_answer.txt"

# A scheduler may list a job only some time after it has accepted it.
SETTLE_S = 60.0


def merged(job: Job, new: Progress, scheduler_id: str | None) -> Progress:
    """Return the new progress, with earlier values that the new answer omits."""
    waiting = new.state is JobState.QUEUED
    old = job.progress
    return replace(
        new,
        scheduler_id=scheduler_id,
        started_at=None if waiting else new.started_at or old.started_at,
        restarts=_restarts(old, new),
    )


def _restarts(old: Progress, new: Progress) -> int:
    """Return the number of restarts, as the scheduler reports it or as observed."""
    seen = old.restarts
    if old.state is JobState.RUNNING:
        later = (new.started_at or 0) > (old.started_at or float("inf")) + 1
        seen += int(new.state is JobState.QUEUED or later)
    return max(new.restarts, old.restarts) if new.restarts else seen


def is_settled(job: Job) -> bool:
    """Return whether a scheduler that has accepted the job must list it by now."""
    return time.time() - job.submitted_at >= SETTLE_S


def silent(job: Job, scheduler: str, answer: Answer) -> Progress:
    """Return the recorded progress, with the reason why there is no newer one."""
    if answer.code == 0 and answer.out.strip():
        return unclear(job, f"{scheduler}'s answer cannot be parsed", answer)
    if answer.code == 0 and not answer.err:
        return left_out(job, scheduler)
    return unclear(job, f"{scheduler} does not answer: {answer.message}")


def unclear(job: Job, why: str, answer: Answer | None = None) -> Progress:
    """Return the recorded progress, with why the answer is unclear; save the answer, if given."""
    if answer is not None:
        kept = job.directory / UNREAD_FILE
        with contextlib.suppress(OSError):
            write_file(kept, f"{answer.out}\n{answer.err}")
            why += f"; it is kept in {kept}"
    return replace(job.progress, silence=why)


def left_out(job: Job, scheduler: str) -> Progress:
    """Return the recorded progress of a job that the answer does not mention."""
    what = f"job {job.progress.scheduler_id}" if job.progress.scheduler_id else "this job"
    return unclear(job, f"{scheduler} answers, but does not mention {what}")


def unknown(job: Job, hint: str) -> Progress:
    """Return the progress of a job that its scheduler does not know; LOST after a grace period.

    If all tasks of an array have recorded their end, these records are the end of the array.
    """
    if not is_settled(job):
        return job.progress
    tasks = {n: task_progress(job, n) for n in range(len(job.request.tasks))}
    if tasks and all(task.state.ended for task in tasks.values()):
        return merged(job, aggregate(tasks), job.progress.scheduler_id)
    return replace(job.progress, state=JobState.LOST, why=hint)


def unconfirmed(job: Job, scheduler: str) -> Progress:
    """Return the progress of a job that may have been submitted and was not found."""
    return unknown(
        job,
        f"{scheduler} did not confirm the submission and does not know the job; submit it again",
    )


# If tasks ended differently, the first of these is the state of the array.
_WORST = (
    JobState.FAILED,
    JobState.NODE_FAIL,
    JobState.TIMEOUT,
    JobState.CANCELLED,
    JobState.LOST,
    JobState.STOPPED,
    JobState.COMPLETED,
)
NAMED = 3  # at most so many failed tasks are named


def aggregate(tasks: Mapping[int, Progress]) -> Progress:
    """Return the progress of an array of at least one task.

    QUEUED until a task has started, RUNNING until all have ended, then COMPLETED if all completed,
    else the worst end, with the exit code of the first task with this end.
    """
    tasks = {index: or_stopped(progress) for index, progress in tasks.items()}
    states = Counter(progress.state for progress in tasks.values())
    starts = [p.started_at for p in tasks.values() if p.started_at is not None]
    ends = [p.ended_at for p in tasks.values() if p.ended_at is not None]
    live = any(not state.ended for state in states)
    state = next((s for s in _WORST if s in states), JobState.QUEUED)
    if states.keys() == {JobState.QUEUED}:
        state = JobState.QUEUED
    elif live:
        state = JobState.RUNNING
    alike = [tasks[index] for index in sorted(tasks) if tasks[index].state is state]
    return Progress(
        state=state,
        exit_code=None if live else alike[0].exit_code,
        why=alike[0].why if state is JobState.QUEUED else _why(tasks),
        started_at=min(starts, default=None),
        ended_at=None if live else max(ends, default=None),
        tasks={s.value: states[s] for s in JobState if states[s]},
        bad_nodes=tuple(sorted({node for p in tasks.values() for node in p.bad_nodes})),
        restarts=max(progress.restarts for progress in tasks.values()),
    )


def _why(tasks: Mapping[int, Progress]) -> str:
    """Return how many tasks completed and which failed; empty if all completed."""
    done = {i for i in tasks if tasks[i].state is JobState.COMPLETED}
    if len(done) == len(tasks):
        return ""
    bad = [i for i in sorted(tasks) if tasks[i].state.ended and i not in done]
    words = [f"{len(done)} of {len(tasks)} tasks completed"]
    words += [f"task {index} {_end(tasks[index])}" for index in bad[:NAMED]]
    if len(bad) > NAMED:
        words.append(f"and {len(bad) - NAMED} more")
    return ", ".join(words)


def _end(progress: Progress) -> str:
    detail = "" if progress.exit_code is None else f" (exit code {progress.exit_code})"
    if progress.bad_nodes:
        detail = f" ({', '.join(progress.bad_nodes)})"
    return f"{progress.state.value}{detail}"
