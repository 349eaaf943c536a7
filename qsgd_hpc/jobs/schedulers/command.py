"""Run a scheduler's command and read its answer; shared by the batch schedulers."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs.model import Job, JobState, Progress

__all__ = ["Answer", "UnconfirmedError", "ask", "refusal", "unknown"]

TIMEOUT_S = 60.0
HUNG = 124
# A scheduler needs a moment before it knows a job that it has just accepted.
SETTLE_S = 60.0


class UnconfirmedError(LaunchError):
    """The scheduler did not say whether it has taken the job."""


@dataclass(frozen=True)
class Answer:
    """What a command printed, and its exit code (127: the command is not there)."""

    out: str
    err: str = ""
    code: int = 0


def ask(argv: Sequence[str], *, cwd: Path | None = None) -> Answer:
    """Run a command; a missing one, or one that hangs, is an answer as well."""
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except OSError as error:
        return Answer("", f"{argv[0]}: {error.strerror}", 127)
    except subprocess.TimeoutExpired:
        return Answer("", f"{argv[0]}: no answer within {TIMEOUT_S:g} s", HUNG)
    return Answer(
        done.stdout.decode("utf-8", "replace"),
        done.stderr.decode("utf-8", "replace"),
        done.returncode,
    )


def refusal(command: str, answer: Answer, remedies: Iterable[tuple[str, str]]) -> LaunchError:
    """Turn a refusal into an error that quotes the scheduler and adds the remedy, if known."""
    if answer.code == HUNG:
        return UnconfirmedError(
            f"{answer.err}. The job may or may not be submitted: it stays in `qsgd-hpc list`."
        )
    said = " ".join((answer.err or answer.out).split()) or f"exit code {answer.code}"
    advice = next((text for words, text in remedies if words in said), "")
    return LaunchError(f"{command} refused the job: {said}\n{advice}".rstrip())


def unknown(job: Job, hint: str) -> Progress:
    """Return the progress of a job that its scheduler does not know (any more, or yet)."""
    if time.time() - job.submitted_at < SETTLE_S:
        return job.progress
    return replace(job.progress, state=JobState.LOST, why=hint)
