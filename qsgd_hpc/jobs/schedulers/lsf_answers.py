"""Parse the output of bjobs into progress. Pure."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping

from qsgd_hpc.jobs.model import JobState, Progress
from qsgd_hpc.jobs.records.endings import (
    NO_MEMORY,
    NOT_MET,
    PREEMPTED,
    WALLTIME,
    exit_words,
    node_words,
)
from qsgd_hpc.jobs.schedulers.command import Answer

__all__ = ["COLUMNS", "Bjobs", "parse_bjobs", "time_of"]

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
        try:
            stamp = " ".join([*text.split()[:3], str(year)])
            at = time.mktime(time.strptime(stamp, "%b %d %H:%M %Y"))
        except (ValueError, OverflowError):
            continue
        if at <= time.mktime(today) + 86400:
            return at
    return None
