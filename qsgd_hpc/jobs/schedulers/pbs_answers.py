"""Parses the output of qstat into progress. Pure.

Exit codes below zero are those of PBS itself: OpenPBS, src/include/job.h, JOB_EXEC_*.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qsgd_hpc.jobs.model import JobState, Progress
from qsgd_hpc.jobs.records.endings import NO_MEMORY, NOT_MET, WALLTIME, exit_words, node_words
from qsgd_hpc.jobs.schedulers.arrays import aggregate
from qsgd_hpc.jobs.schedulers.command import Answer
from qsgd_hpc.jobs.schedulers.pbs_json import read

__all__ = ["Qstat", "array_progress", "parse_qstat"]

# All is well; one of the jobs has ended; one of the jobs is not known.
SPEAKING = (0, 35, 153)
UNREAD = "PBS's answer about it cannot be parsed"

WALLTIME_EXIT = -29
# The MoM of the first node restarted or is out of reach; -14: that of another one.
FIRST_NODE_EXITS = (-4, -5, -6, -20, -32)
NODE_EXITS = (*FIRST_NODE_EXITS, -14)
MEMORY_EXITS = (-26, -27, -31)
SUBSTATE_CANCELLED = 91

_LIVE = {"R": JobState.RUNNING, "E": JobState.RUNNING, "B": JobState.RUNNING}
_WAITING = {
    "W": "waits for its start time",
    "S": "suspended",
    "U": "suspended",
    "T": "on its way to another server",
    "M": "moved to another server",
}
# What a job waits for; PBS deletes the job when that can no longer come true.
_NEEDED = re.compile(r"\b(after\w*|on):")
_HELD_BY = {
    "u": "its user; release it with `qrls`",
    "o": "an operator",
    "s": "PBS or an administrator",
}


class Qstat(dict[str, Progress]):
    """The answer of PBS: progress by job id.

    Attributes:
        unknown: ids that PBS says it does not know.
        unclear: ids that it shows, and why their state cannot be told.
        outputs: from the path of each job's output to its id.
        unread: the last answer of which some of that could not be read.
        silence: the first answer that was none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unknown: frozenset[str] = frozenset()
        self.unclear: dict[str, str] = {}
        self.outputs: dict[str, str] = {}
        self.unread: Answer | None = None
        self.silence: Answer | None = None

    def add(self, other: Qstat) -> None:
        """Take in what PBS said to a later question."""
        self.update(other)
        self.unknown |= other.unknown
        self.unclear |= other.unclear
        self.outputs |= other.outputs
        self.unread = other.unread or self.unread
        self.silence = self.silence or other.silence

    def tells(self, key: str) -> bool:
        """Return whether PBS has said anything of a job, or of a task of an array."""
        return key in self or key in self.unknown or bool(self.doubt(key)) or any(self.tasks(key))

    def tasks(self, key: str) -> dict[int, Progress]:
        """Return the tasks that are shown of the array with the id ``15[].server``."""
        found = ((_task_of(key, one), progress) for one, progress in self.items())
        return {task: progress for task, progress in found if task is not None}

    def doubt(self, key: str) -> str:
        """Return why the state of a job, or of a task of it, cannot be told; mostly empty."""
        hidden = (why for one, why in self.unclear.items() if one == key or _is_task(key, one))
        return next(hidden, "")


def _task_of(key: str, one: str) -> int | None:
    """Return which task of the array ``key`` the id is; None if it is none."""
    head, brackets, server = key.partition("[]")
    if not brackets or not one.startswith(head):
        return None
    match = re.fullmatch(rf"{re.escape(head)}\[([0-9]+)\]{re.escape(server)}", one)
    return int(match[1]) if match else None


def _is_task(key: str, one: str) -> bool:
    return _task_of(key, one) is not None


def parse_qstat(answer: Answer) -> Qstat:
    """Return what ``qstat -x -t -f -F json`` says.

    Valid answers come with exit codes 35 and 153 too. A server that is down gives the head of an
    answer, without jobs, and another exit code.
    """
    result = Qstat()
    shown = read(answer.out)
    result.unknown = frozenset(re.findall(r"Unknown Job Id (\S+)", answer.err))
    jobs = shown.jobs if shown else {}
    for job_id, fields in jobs.items():
        progress = _progress(fields)
        if shown and not shown.whole and "[" in job_id:
            continue  # other tasks of the array may be missing
        if progress is None:
            state = fields.get("job_state")
            result.unclear[job_id] = f"PBS reports an unknown state ({state!r})"
        else:
            result[job_id] = progress
        host, _, path = _text(fields, "Output_Path").partition(":")
        result.outputs[path or host] = job_id
    if shown and shown.unread:
        result.unread = answer
        result.unclear |= dict.fromkeys(shown.unread, UNREAD)
    spoke = shown is not None and (answer.code in SPEAKING or jobs or shown.unread)
    if not spoke and not result.unknown:
        result.silence = answer
    return result


def _progress(fields: Mapping[str, Any]) -> Progress | None:
    """Return what the attributes of one job say; None for a state of an unknown name."""
    letter, runs = _text(fields, "job_state"), _number(fields, "run_count") or 0
    started = _time(_text(fields, "stime"))
    if letter in _LIVE:
        return Progress(_LIVE[letter], started_at=started, restarts=max(runs - 1, 0))
    if letter in ("F", "X"):
        ending = _ending(fields)
        ended = _time(_text(fields, "obittime"))
        return replace(ending, started_at=started, ended_at=ended, restarts=max(runs - 1, 0))
    if letter in ("Q", "H", *_WAITING):
        return Progress(JobState.QUEUED, why=_waiting(letter, fields), restarts=runs)
    return None


def _waiting(letter: str, fields: Mapping[str, Any]) -> str:
    comment = _text(fields, "comment")
    if letter != "H":
        return _WAITING.get(letter, comment)
    if depend := _text(fields, "depend"):
        return f"waits for other jobs to end ({depend})"
    who = [words for kind, words in _HELD_BY.items() if kind in _text(fields, "Hold_Types")]
    return f"held by {' and '.join(who) or 'PBS'}" + (f" ({comment})" if comment else "")


def _ending(fields: Mapping[str, Any]) -> Progress:
    """Return state, exit code and reason of a finished job.

    A job cancelled while it ran carries Exit_status 0, so the substate is read first. One that PBS
    deletes because of a dependency has neither a start nor an Exit_status; nor has a task of an
    array (X) whose end it did not keep.
    """
    status, comment = _number(fields, "Exit_status"), _text(fields, "comment")
    if _number(fields, "substate") == SUBSTATE_CANCELLED:
        return Progress(JobState.CANCELLED, why=comment or "cancelled")
    if status is None and _text(fields, "job_state") == "F" and not _text(fields, "stime"):
        waited = _NEEDED.search(_text(fields, "depend"))
        return Progress(JobState.CANCELLED, why=NOT_MET if waited else comment or "it never ran")
    if status is None:
        return Progress(JobState.FAILED, why=comment or "PBS ended it without an exit code")
    if status == 0:
        return Progress(JobState.COMPLETED, 0)
    if status == WALLTIME_EXIT:
        return Progress(JobState.TIMEOUT, why=f"{WALLTIME} ({comment})" if comment else WALLTIME)
    if status in NODE_EXITS:
        nodes = _failed_nodes(status, _text(fields, "exec_host"), comment)
        return Progress(JobState.NODE_FAIL, why=node_words(nodes), bad_nodes=nodes)
    if status in MEMORY_EXITS:
        return Progress(JobState.FAILED, why=NO_MEMORY)
    if status < 0:
        detail = f": {comment}" if comment else ""
        return Progress(JobState.FAILED, why=f"PBS ended it (Exit_status {status}){detail}")
    code = status - 128 if status > 256 else status  # 256 + n, as 128 + n, stands for signal n
    return Progress(JobState.FAILED, code, exit_words(code))


def _failed_nodes(status: int, exec_host: str, comment: str) -> tuple[str, ...]:
    """Return the nodes that the comment names, beside where the job ran, or the first node."""
    nodes = [part.partition("/")[0] for part in exec_host.split("+") if part]
    news = re.sub(r"\([^)]*\)", "", comment)
    named = [node for node in nodes if re.search(rf"\b{re.escape(node)}\b", news)]
    blamed = named or (nodes[:1] if status in FIRST_NODE_EXITS or len(set(nodes)) == 1 else [])
    return tuple(dict.fromkeys(blamed))


def array_progress(shown: Qstat, key: str) -> Progress | None:
    """Return the progress of the array with the id ``15[].server`` from that of its tasks."""
    whole = shown.get(key)
    tasks = {index: _task(progress, whole) for index, progress in shown.tasks(key).items()}
    return aggregate(tasks) if tasks else whole


def _task(task: Progress, whole: Progress | None) -> Progress:
    """Return the end of a task; PBS may not keep it, and then says of the array how all went."""
    forgotten = task.state is JobState.FAILED and task.exit_code is None and not task.started_at
    if forgotten and whole is not None and whole.state is JobState.COMPLETED:
        return Progress(JobState.COMPLETED, 0)
    return task


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name, "")
    return value if isinstance(value, str) else ""


def _number(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return value if type(value) is int else None


def _time(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%a %b %d %H:%M:%S %Y"))
    except (ValueError, OverflowError):
        return None
