"""A scheduler that does not exist: tqsub, tqstat, tqdel."""

from __future__ import annotations

from collections.abc import Sequence

from qsgd_hpc.jobs.model import Job, JobState, Progress
from qsgd_hpc.jobs.schedulers.common import (
    Answer,
    Dependency,
    ask,
    merged,
    no_answer,
    not_cancelled,
    refusal,
    silent,
    submitted,
    unknown,
)

__all__ = ["cancel", "find", "parse_tqstat", "refresh", "submit"]

STATES = {"Q": JobState.QUEUED, "R": JobState.RUNNING}


def submit(job: Job, after: Sequence[Dependency] = ()) -> Progress:
    """Hand the script to tqsub, which prints the job's number."""
    waits = [word for each in after for word in ("-w", each.scheduler_id)]
    answer = ask(["tqsub", "-o", str(job.log_path), *waits, str(job.script_path)])
    number = answer.out.strip() if answer.code == 0 else ""
    return submitted(job, number or None, refusal("tqsub", answer, ()), find)


def parse_tqstat(answer: Answer) -> dict[str, list[str]]:
    """Return state, exit code and output of each job, by its number."""
    return {words[0]: words[1:] for line in answer.out.splitlines() if (words := line.split())}


def find(job: Job) -> str | None:
    """Return the number of the job that writes this output."""
    answer = ask(["tqstat"])
    if answer.code != 0:
        raise no_answer("tqstat", answer)
    rows = parse_tqstat(answer)
    return next((n for n, row in rows.items() if row[-1] == str(job.log_path)), None)


def refresh(jobs: Sequence[Job]) -> dict[str, Progress]:
    """Ask tqstat once for all jobs."""
    answer = ask(["tqstat"])
    if answer.code != 0:
        return {job.id: silent(job, "toyq", answer) for job in jobs}
    rows = parse_tqstat(answer)
    return {job.id: _news(job, rows) for job in jobs}


def _news(job: Job, rows: dict[str, list[str]]) -> Progress:
    number = job.progress.scheduler_id
    if number is None or number not in rows:
        return unknown(job, f"toyq knows no job {number}")
    state, code, _ = rows[number]
    if state in STATES:
        return merged(job, Progress(STATES[state]), number)
    ended = JobState.FAILED if int(code) else JobState.COMPLETED
    return merged(job, Progress(ended, int(code)), number)


def cancel(job: Job) -> None:
    """Ask tqdel to end the job."""
    answer = ask(["tqdel", str(job.progress.scheduler_id)])
    if answer.code != 0:
        raise not_cancelled("tqdel", answer)
