"""What qstat prints, as progress. Pure.

Exit codes below zero are those of PBS itself: OpenPBS, src/include/job.h, JOB_EXEC_*.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qsgd_hpc.jobs.model import JobState, Progress
from qsgd_hpc.jobs.schedulers.arrays import aggregate
from qsgd_hpc.jobs.schedulers.command import Answer
from qsgd_hpc.jobs.schedulers.endings import NO_MEMORY, WALLTIME, exit_words, node_words

__all__ = ["Qstat", "array_progress", "parse_qstat"]

WALLTIME_EXIT = -29
# The MoM of the first node restarted or is out of reach; -14: that of another one.
FIRST_NODE_EXITS = (-4, -5, -6, -20, -32)
NODE_EXITS = (*FIRST_NODE_EXITS, -14)
MEMORY_EXITS = (-26, -27, -31)
SUBSTATE_CANCELLED = 91

# Values of Variable_List come as the user has set them, with backslashes that escape nothing.
_BACKSLASH = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_LIVE = {"R": JobState.RUNNING, "E": JobState.RUNNING, "B": JobState.RUNNING}
_WAITING = {
    "W": "waits for its start time",
    "S": "suspended",
    "U": "suspended",
    "T": "on its way to another server",
    "M": "moved to another server",
}
_HELD_BY = {"u": "its user; `qrls` lets it go", "o": "an operator", "s": "PBS or an administrator"}


class Qstat(dict[str, Progress]):
    """Progress by job id.

    ``answered``: PBS said something; ``unknown`` are the ids that it says it does not know;
    ``outputs`` maps the path of each job's output to its id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answered = False
        self.unknown: frozenset[str] = frozenset()
        self.outputs: dict[str, str] = {}


def parse_qstat(answer: Answer) -> Qstat:
    """Return what ``qstat -x -t -f -F json`` says.

    Valid answers come with exit codes 35 and 153 too, so the code is not looked at.
    """
    result = Qstat()
    shown = _json(answer.out)
    result.unknown = frozenset(re.findall(r"Unknown Job Id (\S+)", answer.err))
    result.answered = bool(shown or result.unknown)
    jobs = shown.get("Jobs", {})
    for job_id, fields in jobs.items() if isinstance(jobs, dict) else ():
        if isinstance(fields, dict) and (progress := _progress(fields)) is not None:
            result[job_id] = progress
            host, _, path = _text(fields, "Output_Path").partition(":")
            result.outputs[path or host] = job_id
    return result


def _json(text: str) -> dict[str, Any]:
    for candidate in (text, _BACKSLASH.sub(lambda m: m[0] if m[1] else r"\\", text)):
        try:
            content = json.loads(candidate, strict=False)
        except (ValueError, RecursionError):
            continue
        return content if isinstance(content, dict) else {}
    return {}


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

    A job cancelled while it ran carries Exit_status 0, so the substate is read first.
    """
    status, comment = _number(fields, "Exit_status"), _text(fields, "comment")
    if _number(fields, "substate") == SUBSTATE_CANCELLED:
        return Progress(JobState.CANCELLED, why=comment or "cancelled")
    if status is None:
        never = comment or "it never ran: what it depends on failed"
        return Progress(JobState.FAILED, why=never)
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


def array_progress(shown: Mapping[str, Progress], key: str) -> Progress | None:
    """Return the progress of the array with the id ``15[].server`` from that of its tasks."""
    head, _, server = key.partition("[]")
    pattern = re.compile(rf"{re.escape(head)}\[(\d+)\]{re.escape(server)}")
    found = ((pattern.fullmatch(one), progress) for one, progress in shown.items())
    whole = shown.get(key)
    tasks = {int(match[1]): _task(progress, whole) for match, progress in found if match}
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
    return value if isinstance(value, int) else None


def _time(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%a %b %d %H:%M:%S %Y"))
    except (ValueError, OverflowError):
        return None
