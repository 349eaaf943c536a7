"""IBM Spectrum LSF: bsub, bjobs, bkill.

Written from the command reference of LSF 10.1, and never tried on a live system. LSF numbers the
tasks of an array from 1, this package from 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from qsgd_hpc.jobs.model import Job, Progress
from qsgd_hpc.jobs.records.events import task_progress
from qsgd_hpc.jobs.schedulers.command import (
    Answer,
    Dependency,
    ask,
    log_path,
    no_answer,
    not_cancelled,
    refusal,
    submitted,
)
from qsgd_hpc.jobs.schedulers.lsf_answers import COLUMNS, Bjobs, parse_bjobs
from qsgd_hpc.jobs.schedulers.progress import (
    aggregate,
    merged,
    open_jobs,
    silent,
    unclear,
    unconfirmed,
    unknown,
)

__all__ = ["cancel", "find", "parse_bsub", "refresh", "submit"]

REMEDIES = (
    ("No such queue", "Use --queue with a name that `bqueues` lists."),
    ("project", "Use --account with one of your projects."),
    ("RUNLIMIT", "Use a shorter --walltime, or another --queue; see `bqueues -l`."),
    ("Too many processors", "Use fewer --nodes, or another --queue; see `bqueues -l`."),
    ("Pending job threshold", "Wait until one of your jobs has started."),
    ("Dependency condition", "LSF no longer knows a job of --after; remove it."),
    ("Bad resource requirement", "This LSF does not know a directive of the site's profile."),
)


def submit(job: Job, after: Sequence[Dependency] = ()) -> Progress:
    """Submit the script with bsub, which reads it; output is in the job's directory."""
    words = {"ok": "done", "any": "ended"}
    terms = [f"{words[each.kind]}({each.scheduler_id})" for each in after]
    # -ti: end a job whose condition can no longer become true, whatever the site's default is.
    depends = ["-w", " && ".join(terms), "-ti"] if terms else []
    argv = ["bsub", "-o", _log(job), *depends]
    answer = ask(argv, cwd=job.request.workdir, stdin=job.script_path)
    return submitted(job, parse_bsub(answer), refusal("bsub", answer, REMEDIES), find)


def _log(job: Job) -> str:
    return str(log_path(job, "%I"))


def parse_bsub(answer: Answer) -> str | None:
    """Return the id in ``Job <42> is submitted to queue <batch>.``"""
    ids = re.findall(r"Job <([0-9]+)> is submitted", answer.out)
    return ids[-1] if answer.code == 0 and ids else None


def _bjobs(*ids: str) -> tuple[Bjobs | None, Answer]:
    answer = ask(["bjobs", "-a", "-json", "-o", COLUMNS, *ids])
    return parse_bjobs(answer), answer


def find(job: Job) -> str | None:
    """Return the id of a job whose submission was not confirmed; None if LSF knows none.

    Raises:
        LaunchError: LSF does not answer.
    """
    shown, answer = _bjobs()
    if shown is None:
        raise no_answer("bjobs", answer)
    return shown.outputs.get(_log(job))


def refresh(jobs: Sequence[Job]) -> dict[str, Progress]:
    """Query bjobs once for all jobs of the user."""
    jobs = open_jobs(jobs)
    if not jobs:
        return {}
    shown, answer = _bjobs()
    if shown is None:
        return {job.id: silent(job, "LSF", answer) for job in jobs}
    return {job.id: _news(job, shown) for job in jobs}


def _news(job: Job, shown: Bjobs) -> Progress:
    key = job.progress.scheduler_id or shown.outputs.get(_log(job))
    if key is None:
        return unconfirmed(job, "LSF")
    if _lacks(job, key, shown):
        alone, answer = _bjobs(key)
        if alone is None:
            return replace(silent(job, "LSF", answer), scheduler_id=key)
        shown.add(alone)
    if key in shown.unclear:
        word = shown.unclear[key]
        return unclear(job, f"LSF reports an unknown state ({word})")
    tasks: Mapping[int, Progress] = shown.get(key, {})
    if not tasks:
        return unknown(job, f"LSF no longer knows job {key}; `bhist -l {key}` may")
    if job.request.array:
        # LSF deletes a task an hour after its end, although others still run.
        own = {n: task_progress(job, n) for n in range(len(job.request.tasks))}
        return merged(job, aggregate({n: tasks.get(n + 1, own[n]) for n in own}), key)
    return merged(job, next(iter(tasks.values())), key)


def _lacks(job: Job, key: str, shown: Bjobs) -> bool:
    """Return whether LSF has omitted the job, or a task of it."""
    return key not in shown.unclear and len(shown.get(key, {})) < max(1, len(job.request.tasks))


def cancel(job: Job) -> None:
    """End the job and all its tasks with bkill; an ended or unknown job is not an error."""
    key = job.progress.scheduler_id or find(job)
    if key is None:
        return
    answer = ask(["bkill", key])
    said = answer.out + answer.err
    if answer.code != 0 and not any(words in said for words in _NOTHING_TO_CANCEL):
        raise not_cancelled("bkill", answer)


_NOTHING_TO_CANCEL = ("already finished", "No matching job found", "is not found")
