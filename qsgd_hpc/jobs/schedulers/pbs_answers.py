"""Parse the output of qstat into progress. Pure.

Negative exit codes are those of PBS itself: OpenPBS, src/include/job.h, JOB_EXEC_*.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qsgd_hpc.jobs.model import JobState, Progress
from qsgd_hpc.jobs.records.endings import NO_MEMORY, NOT_MET, WALLTIME, exit_words, node_words
from qsgd_hpc.jobs.schedulers.command import Answer, epoch_s
from qsgd_hpc.jobs.schedulers.pbs_json import read
from qsgd_hpc.jobs.schedulers.progress import aggregate

__all__ = ["Qstat", "array_progress", "parse_qstat"]

# Exit codes of valid answers: success, a job has ended, a job is unknown.
VALID_CODES = (0, 35, 153)
TIME_FORMAT = "%a %b %d %H:%M:%S %Y"
UNREAD = "PBS's answer about it cannot be parsed"

WALLTIME_EXIT = -29
# The MoM of the first node restarted or cannot be reached; -14: the MoM of another node.
FIRST_NODE_EXITS = (-4, -5, -6, -20, -32)
NODE_EXITS = (*FIRST_NODE_EXITS, -14)
MEMORY_EXITS = (-26, -27, -31)
SUBSTATE_CANCELLED = 91

_RUNNING = {
    **{"R": "", "E": "", "B": ""},
    "S": "suspended, perhaps for a job of higher priority",
    "U": "suspended, while its node's keyboard is in use",
}
_WAITING = {
    "W": "waits for its start time",
    "T": "on its way to another server",
    "M": "moved to another server",
}
# Dependencies of a job; PBS deletes the job when they can no longer be met.
_NEEDED = re.compile(r"\b(after\w*|on):")
_HELD_BY = {
    "u": "its user; release it with `qrls`",
    "o": "an operator",
    "s": "PBS or an administrator",
}


class Qstat(dict[str, Progress]):
    """The answer of PBS: progress by job id.

    Attributes:
        unknown: ids that PBS reports as unknown.
        unclear: why a state is unclear, by id.
        outputs: ids, by the path of the job's output.
        unread: the last answer that could not be parsed completely.
        silence: the first failed answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unknown: frozenset[str] = frozenset()
        self.unclear: dict[str, str] = {}
        self.outputs: dict[str, str] = {}
        self.unread: Answer | None = None
        self.silence: Answer | None = None

    def add(self, other: Qstat) -> None:
        """Add the answer to a later query."""
        self.update(other)
        self.unknown |= other.unknown
        self.unclear |= other.unclear
        self.outputs |= other.outputs
        self.unread = other.unread or self.unread
        self.silence = self.silence or other.silence

    def mentions(self, key: str) -> bool:
        """Return whether the answers mention a job, or a task of an array."""
        shown = key in self or key in self.unknown or any(self.tasks(key))
        return shown or bool(self.why_unclear(key))

    def tasks(self, key: str) -> dict[int, Progress]:
        """Return the progress of the listed tasks of the array with the id ``15[].server``."""
        found = ((_task_of(key, one), progress) for one, progress in self.items())
        return {task: progress for task, progress in found if task is not None}

    def why_unclear(self, key: str) -> str:
        """Return why the state of a job, or of one of its tasks, is unclear; empty if clear."""
        for one, why in self.unclear.items():
            if one == key or _task_of(key, one) is not None:
                return why
        return ""


def _task_of(key: str, one: str) -> int | None:
    """Return the task of the array ``key`` with the id ``one``; None: it is no task of it."""
    head, brackets, server = key.partition("[]")
    if not brackets or not one.startswith(head):
        return None
    match = re.fullmatch(rf"{re.escape(head)}\[([0-9]+)\]{re.escape(server)}", one)
    return int(match[1]) if match else None


def parse_qstat(answer: Answer) -> Qstat:
    """Parse the output of ``qstat -x -t -f -F json``.

    If the server is down, qstat prints the head of an answer, without jobs, and its exit code is
    not one of VALID_CODES.
    """
    result = Qstat()
    shown = read(answer.out)
    result.unknown = frozenset(re.findall(r"Unknown Job Id (\S+)", answer.err))
    jobs = shown.jobs if shown else {}
    for job_id, fields in jobs.items():
        progress = _progress(fields)
        if shown and not shown.complete and "[" in job_id:
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
    answered = shown is not None and (answer.code in VALID_CODES or jobs or shown.unread)
    if not answered and not result.unknown:
        result.silence = answer
    return result


def _progress(fields: Mapping[str, Any]) -> Progress | None:
    """Return the progress in the attributes of one job; None if its state has an unknown name."""
    letter, runs = _text(fields, "job_state"), _number(fields, "run_count") or 0
    started = epoch_s(_text(fields, "stime"), TIME_FORMAT)
    if letter in _RUNNING:
        return Progress(
            JobState.RUNNING,
            why=_RUNNING[letter],
            started_at=started,
            restarts=max(runs - 1, 0),
        )
    if letter in ("F", "X"):
        ending = _ending(fields)
        ended = epoch_s(_text(fields, "obittime"), TIME_FORMAT)
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

    A job that was cancelled while it ran has Exit_status 0, so the substate is checked first. A job
    that PBS deleted because of a dependency has neither a start nor an Exit_status; nor has a task
    of an array (X) whose end PBS did not store.
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
    code = status - 128 if status > 256 else status  # 256 + n and 128 + n stand for signal n
    return Progress(JobState.FAILED, code, exit_words(code))


def _failed_nodes(status: int, exec_host: str, comment: str) -> tuple[str, ...]:
    """Return the nodes of the job that the comment names, else its first node if that failed."""
    nodes = [part.partition("/")[0] for part in exec_host.split("+") if part]
    news = re.sub(r"\([^)]*\)", "", comment)
    named = [node for node in nodes if re.search(rf"\b{re.escape(node)}\b", news)]
    blamed = named or (nodes[:1] if status in FIRST_NODE_EXITS or len(set(nodes)) == 1 else [])
    return tuple(dict.fromkeys(blamed))


def array_progress(shown: Qstat, key: str) -> Progress | None:
    """Return the progress of the array with the id ``15[].server``, from its tasks."""
    whole = shown.get(key)
    tasks = {index: _task(progress, whole) for index, progress in shown.tasks(key).items()}
    return aggregate(tasks) if tasks else whole


def _task(task: Progress, whole: Progress | None) -> Progress:
    """Return the progress of a task; if PBS did not store its end, that of a COMPLETED array."""
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
