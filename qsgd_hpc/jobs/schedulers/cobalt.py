"""Cobalt, the scheduler of ALCF's machines until 2023 (Theta, ThetaGPU): qsub, qstat, qdel.

Written from its documentation and its source (cqm.py: states and log messages), and never tried on
a live system. qstat no longer lists a job that has ended; its end is in the log that Cobalt writes
to the job's folder.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs.events import WALLTIME, exit_words
from qsgd_hpc.jobs.model import Job, JobState, Progress
from qsgd_hpc.jobs.schedulers.common import (
    Answer,
    Dependency,
    ask,
    merged,
    no_answer,
    not_cancelled,
    of_kind,
    refusal,
    silent,
    submitted,
    unclear,
    unconfirmed,
    unknown,
)

__all__ = ["cancel", "find", "parse_log", "parse_qstat", "parse_qsub", "refresh", "submit"]

REMEDIES = (
    ("project", "Use --account PROJECT."),
    ("not executable", "Cobalt runs executable scripts only."),
    ("walltime", "Use a --walltime that the queue accepts; see `qstat -Q`."),
    ("queue", "Use --queue with a name that `qstat -Q` lists."),
    ("node", "Use a number of --nodes that the queue accepts; see `qstat -Q`."),
)
_STATES = {
    "queued": (JobState.QUEUED, ""),
    "hold": (JobState.QUEUED, "held"),
    "user_hold": (JobState.QUEUED, "held by its user; release it with `qrls`"),
    "admin_hold": (JobState.QUEUED, "held by an administrator of the machine"),
    "dep_hold": (JobState.QUEUED, "waits for other jobs to end"),
    "dep_fail": (
        JobState.QUEUED,
        "a job that it waits for did not complete: it will never start; cancel it",
    ),
    "maxrun_hold": (JobState.QUEUED, "waits for another job of its user to end"),
    "preempted": (JobState.QUEUED, "preempted by a job of higher priority"),
    "starting": (JobState.RUNNING, ""),
    "running": (JobState.RUNNING, ""),
    "exiting": (JobState.RUNNING, ""),
    "killing": (JobState.RUNNING, ""),
}


def submit(job: Job, after: Sequence[Dependency] = ()) -> Progress:
    """Submit the script with qsub; output and Cobalt's log are in the job's directory.

    Raises:
        LaunchError: refused, or the request is not supported by Cobalt.
    """
    if of_kind(after, "any"):
        raise LaunchError(
            "Cobalt jobs can wait for success only. Use --after ID instead of any:ID."
        )
    log = str(job.log_path)
    depends = ["--dependencies", ":".join(of_kind(after, "ok"))] if after else []
    argv = ["qsub", "-o", log, "-e", log, "--debuglog", str(_debug_log(job)), *depends]
    answer = ask([*argv, str(job.script_path)], cwd=job.request.workdir)
    return submitted(job, parse_qsub(answer), refusal("qsub", answer, REMEDIES), find)


def _debug_log(job: Job) -> Path:
    return job.directory / "cobalt.log"


def parse_qsub(answer: Answer) -> str | None:
    """Return the job id, the last line that is a number (notes about routing come before it)."""
    ids = re.findall(r"^\s*([0-9]+)\s*$", answer.out, re.MULTILINE)
    return ids[-1] if answer.code == 0 and ids else None


def parse_qstat(answer: Answer) -> dict[str, dict[str, str]] | None:
    """Return the fields of each job that ``qstat -f -l`` lists, by job id and lower-case name.

    None: no or an incomplete answer. If there are no jobs, Cobalt prints nothing.
    """
    jobs: dict[str, dict[str, str]] = {}
    fields: dict[str, str] = {}
    for line in answer.out.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip().lower() == "jobid":
            fields = jobs.setdefault(value.strip(), {})
        elif colon:
            fields[name.strip().lower()] = value.strip()
    strange = not jobs and (answer.err.strip() or answer.out.strip())
    return None if strange or answer.code not in (0, 1) else jobs


def _listed() -> tuple[dict[str, dict[str, str]] | None, Answer]:
    answer = ask(["qstat", "-f", "-l", "-u", getpass.getuser()])
    return parse_qstat(answer), answer


def find(job: Job) -> str | None:
    """Return the id of a live job whose submission was not confirmed; None if there is none.

    Raises:
        LaunchError: Cobalt does not answer.
    """
    listed, answer = _listed()
    if listed is None:
        raise no_answer("qstat", answer)
    return _found(job, listed)


def _found(job: Job, listed: Mapping[str, Mapping[str, str]]) -> str | None:
    log = str(job.log_path)
    return next((key for key, fields in listed.items() if fields.get("outputpath") == log), None)


def refresh(jobs: Sequence[Job]) -> dict[str, Progress]:
    """Query qstat once for all jobs of the user, and read the logs of jobs that it omits."""
    listed, answer = _listed()
    if listed is None:
        return {job.id: silent(job, "Cobalt", answer) for job in jobs}
    return {job.id: _news(job, listed) for job in jobs}


def _news(job: Job, listed: Mapping[str, Mapping[str, str]]) -> Progress:
    key = job.progress.scheduler_id or _found(job, listed)
    if key is None:
        return unconfirmed(job, "Cobalt")
    if key not in listed:
        try:
            end = parse_log(_debug_log(job).read_text("utf-8", "replace"))
        except OSError:
            end = None
        if end is not None:
            return merged(job, end, key)
        answer = ask(["qstat", "-f", "-l", key])
        alone = parse_qstat(answer)
        if alone is None:
            return silent(job, "Cobalt", answer)
        listed = alone
    if key not in listed:
        return unknown(job, f"Cobalt does not know job {key}, and its log does not contain its end")
    word = listed[key].get("state", "none")
    if word not in _STATES:
        return unclear(job, f"Cobalt reports an unknown state ({word})")
    state, why = _STATES[word]
    return merged(job, Progress(state, why=why), key)


def parse_log(text: str) -> Progress | None:
    """Return the end of a job from Cobalt's log, or None."""
    if "user delete requested" in text:
        return Progress(JobState.CANCELLED, why="cancelled")
    if "maximum execution time exceeded" in text:
        return Progress(JobState.TIMEOUT, why=WALLTIME)
    codes = re.findall(r"completed normally with an exit code of (-?\d{1,9})\b", text)
    if not codes:
        return None
    code = int(codes[-1])
    if code == 0:
        return Progress(JobState.COMPLETED, 0)
    return Progress(JobState.FAILED, code, exit_words(code))


def cancel(job: Job) -> None:
    """End the job with qdel; a job that is no longer listed is not an error."""
    key = job.progress.scheduler_id or find(job)
    if key is None:
        return
    answer = ask(["qdel", key])
    if answer.code != 0 and key in (_listed()[0] or {key: {}}):
        raise not_cancelled("qdel", answer)
