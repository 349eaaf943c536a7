"""Run a scheduler's command and read its output; shared by the batch schedulers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from qsgd_hpc._notices import tell
from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs.model import Job, Progress

__all__ = [
    "Answer",
    "Dependency",
    "UnconfirmedError",
    "ask",
    "batches",
    "epoch_s",
    "log_path",
    "mark",
    "no_answer",
    "not_cancelled",
    "of_kind",
    "refusal",
    "run_cancel",
    "submitted",
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
    def message(self) -> str:
        """The error message, else the output, in one line."""
        return " ".join((self.err or self.out).split())[:300] or f"exit code {self.code}"


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


def log_path(job: Job, index: str) -> Path:
    """Return the path of the output; for an array with ``index``, the scheduler's placeholder."""
    return job.directory / f"output-{index}.log" if job.request.array else job.log_path


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
    said = " ".join((answer.err or answer.out).split()) or f"exit code {answer.code}"
    advice = next((text for words, text in remedies if words in said), "")
    return LaunchError(f"{command} refused the job: {said}\n{advice}".rstrip())


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
