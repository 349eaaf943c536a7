"""IBM Spectrum LSF: bsub, bjobs, bkill.

Written from the command reference of LSF 10.1, and never tried on a live system. LSF numbers the
tasks of an array from 1, this package from 0.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from qsgd_hpc.jobs.events import (
    NO_MEMORY,
    NOT_MET,
    PREEMPTED,
    WALLTIME,
    exit_words,
    node_words,
    task_progress,
)
from qsgd_hpc.jobs.model import Job, JobState, Progress
from qsgd_hpc.jobs.schedulers.common import (
    Answer,
    Dependency,
    aggregate,
    ask,
    epoch_s,
    merged,
    no_answer,
    refusal,
    run_cancel,
    silent,
    submitted,
    unclear,
    unconfirmed,
    unknown,
)

__all__ = ["cancel", "find", "parse_bjobs", "parse_bsub", "refresh", "submit", "time_of"]

REMEDIES = (
    ("No such queue", "Use --queue with a name that `bqueues` lists."),
    ("project", "Use --account with one of your projects."),
    ("RUNLIMIT", "Use a shorter --walltime, or another --queue; see `bqueues -l`."),
    ("Too many processors", "Use fewer --nodes, or another --queue; see `bqueues -l`."),
    ("Pending job threshold", "Wait until one of your jobs has started."),
    ("Dependency condition", "LSF no longer knows a job of --after; remove it."),
    ("Bad resource requirement", "This LSF does not know a directive of the site's profile."),
)
COLUMNS = (
    "jobid jobindex stat exit_code exit_reason pend_reason start_time finish_time exec_host "
    "output_file"
)
_LIVE = {
    "PEND": (JobState.QUEUED, ""),
    "WAIT": (JobState.QUEUED, "waits for its part of a chunk job"),
    "PROV": (JobState.QUEUED, "waits until its nodes have started"),
    "PSUSP": (JobState.QUEUED, "held; release it with `bresume`"),
    "USUSP": (JobState.RUNNING, "suspended by its user or an administrator"),
    "SSUSP": (JobState.RUNNING, "suspended by LSF"),
    "RUN": (JobState.RUNNING, ""),
    "UNKWN": (JobState.RUNNING, "LSF has lost contact with its first node"),
}
_REASONS = (
    (("TERM_RUNLIMIT", "TERM_DEADLINE"), JobState.TIMEOUT, WALLTIME),
    (("TERM_OWNER", "TERM_ADMIN", "TERM_FORCE"), JobState.CANCELLED, "cancelled"),
    (("TERM_ORPHAN",), JobState.CANCELLED, NOT_MET),
    (("TERM_MEMLIMIT", "TERM_SWAP"), JobState.FAILED, NO_MEMORY),
    (("TERM_PREEMPT", "TERM_BUCKET"), JobState.FAILED, PREEMPTED),
)
_NO_JOBS = ("No job found", "No unfinished job found", "is not found")


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
    return str(job.log_path_of("%I"))


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
    if key := job.progress.scheduler_id or find(job):
        run_cancel(["bkill", key], ("already finished", "No matching job found", "is not found"))


class Bjobs(dict[str, dict[int, Progress]]):
    """Progress by job id and index, which is 0 for a job without an array.

    ``outputs``: ids by output file; ``unclear``: jobs with a task in an unknown state,
    with its name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[str, str] = {}
        self.unclear: dict[str, str] = {}

    def add(self, other: Bjobs) -> None:
        """Add the answer to a later query."""
        self.update(other)
        self.unclear |= other.unclear


def parse_bjobs(answer: Answer) -> Bjobs | None:
    """Parse the output of ``bjobs -a -json -o COLUMNS``; None if LSF did not answer."""
    found = Bjobs()
    try:
        shown = json.loads(answer.out, strict=False)
    except (ValueError, RecursionError):
        said = answer.out + answer.err
        return found if any(words in said for words in _NO_JOBS) else None
    records = shown.get("RECORDS") if isinstance(shown, dict) else None
    if not isinstance(records, list):
        return None
    for record in records:
        if not isinstance(record, dict) or "ERROR" in record:
            continue  # a job that is not known
        fields = {str(name): str(value) for name, value in record.items()}
        key, index = fields.get("JOBID", ""), fields.get("JOBINDEX", "")
        if (progress := _progress(fields)) is None:
            found.unclear[key] = fields.get("STAT", "none")
        else:
            found.setdefault(key, {})[int(index) if _is_number(index) else 0] = progress
        found.outputs[fields.get("OUTPUT_FILE", "")] = key
    return found


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,9}", text) is not None


def _progress(fields: Mapping[str, str]) -> Progress | None:
    """Parse one record; None for an unknown state."""
    word = fields.get("STAT", "")
    started, ended = (time_of(fields.get(name, "")) for name in ("START_TIME", "FINISH_TIME"))
    if word in _LIVE:
        state, why = _LIVE[word]
        if state is JobState.RUNNING:
            return Progress(state, why=why, started_at=started)
        return Progress(state, why=why or _pending(fields.get("PEND_REASON", "")))
    if word == "DONE":
        return Progress(JobState.COMPLETED, 0, "", started, ended)
    if word in ("EXIT", "ZOMBI"):
        state, code, why, nodes = _ending(word, fields)
        return Progress(state, code, why, started, ended, bad_nodes=nodes)
    return None


def _pending(reason: str) -> str:
    if "never satisfied" in reason:
        return f"{reason} It will never start; cancel it"
    return reason


def _ending(
    word: str, fields: Mapping[str, str]
) -> tuple[JobState, int | None, str, tuple[str, ...]]:
    """Return state, exit code, reason and failed nodes of a job that did not complete."""
    reason, code = fields.get("EXIT_REASON", ""), fields.get("EXIT_CODE", "")
    if word == "ZOMBI" or "TERM_ZOMBIE" in reason:
        hosts = re.findall(r"(?:\d+\*)?([^:*\s-][^:*\s]*)", fields.get("EXEC_HOST", ""))
        nodes = (hosts[0],) if len(set(hosts)) == 1 else ()
        return JobState.NODE_FAIL, None, node_words(nodes), nodes
    for words, state, why in _REASONS:
        if any(each in reason for each in words):
            return state, None, why, ()
    if _is_number(code) and int(code):
        return JobState.FAILED, int(code), exit_words(int(code)), ()
    return JobState.FAILED, None, reason or "LSF ended it without a reason", ()


def time_of(text: str, now: float | None = None) -> float | None:
    """Parse ``Nov 21 13:30``, possibly followed by a letter, as the most recent such time."""
    today = time.localtime(now)
    for year in (today.tm_year, today.tm_year - 1):
        at = epoch_s(" ".join([*text.split()[:3], str(year)]), "%b %d %H:%M %Y")
        if at is not None and at <= time.mktime(today) + 86400:
            return at
    return None
