"""OpenPBS and PBS Pro: qsub, qstat, qselect, qdel, and the JSON of qstat."""

from __future__ import annotations

import getpass
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs.events import NO_MEMORY, NOT_MET, WALLTIME, exit_words, node_words
from qsgd_hpc.jobs.model import Job, JobState, Progress
from qsgd_hpc.jobs.registry import write_file
from qsgd_hpc.jobs.schedulers.common import (
    Answer,
    Dependency,
    aggregate,
    ask,
    batches,
    condition,
    epoch_s,
    left_out,
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

__all__ = ["array_progress", "cancel", "find", "parse_qstat", "parse_qsub", "refresh", "submit"]

REMEDIES = (
    ("Account_Name", "Use --account PROJECT."),
    ("filesystems is required", "Use --filesystems with the file systems that the job uses."),
    ("Unknown filesystem", "Use --filesystems with names that `qstat -Bf` lists."),
    ("Unknown queue", "Use --queue with a name that `qstat -Q` lists."),
    ("Access to queue is denied", "Submit to the queue that routes to it, or to another one."),
    ("resource limits", "Nodes or walltime are outside the queue's range; see `qstat -Qf`."),
    ("per-user limit", "Wait until one of your jobs there has ended, or use another --queue."),
    ("Unknown resource", "This PBS does not know a directive of the site's profile."),
    ("Unknown Job Id", "PBS no longer knows a job of --after; remove it."),
    ("Job has finished", "A job of --after has ended; remove it."),
    ("cannot connect to server", "PBS is down; nothing was submitted. Try it later."),
    ("Connection refused", "PBS is down; nothing was submitted. Try it later."),
)
# PBS starts the user's login shell as the leader of the job's session and writes the script's
# path to its standard input (OpenPBS, src/resmom/start_exec.c). The script is then a child of a
# shell without traps, and `qsig`, which signals every process of the session (linux/mom_mach.c,
# kill_session), ends that shell and so the job. `qsub -S` names a program to start instead.
# PBS sets SHELL to this program; the user's shell is in PBS_O_SHELL.
_SHELL = """\
#!/bin/bash
# PBS starts this as the shell of the job (qsub -S). It becomes the login shell that PBS would have
# started, and that becomes the job script: so the script gets the signals that PBS sends.
SHELL=${{PBS_O_SHELL:-/bin/bash}}
[ -x "$SHELL" ] || SHELL=/bin/bash
export SHELL
exec -a "-${{SHELL##*/}}" "$SHELL" -c 'exec {command}' < /dev/null
"""
# qsub -S reads "," and "@" as parts of a list; other characters need quotes in some shells.
_PLAIN = re.compile(r"[A-Za-z0-9_/.+-]+")
# Exit codes of valid answers of qstat: success, a job has ended, a job is unknown.
VALID_CODES = (0, 35, 153)
TIME_FORMAT = "%a %b %d %H:%M:%S %Y"
UNREAD = "PBS's answer about it cannot be parsed"

# Negative exit codes are those of PBS itself: OpenPBS, src/include/job.h, JOB_EXEC_*.
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


def submit(job: Job, after: Sequence[Dependency] = ()) -> Progress:
    """Submit the script with qsub; output is in the job's directory."""
    argv = ["qsub", "-o", _log(job), *_depends(after), *_shell_option(job), str(job.script_path)]
    answer = ask(argv, cwd=job.request.workdir)
    return submitted(job, parse_qsub(answer), refusal("qsub", answer, REMEDIES), find)


def _log(job: Job) -> str:
    return str(job.log_path_of("^array_index^"))


def _depends(after: Sequence[Dependency]) -> list[str]:
    return ["-W", f"depend={condition(after)}"] if after else []


def _shell_option(job: Job) -> list[str]:
    """Write the shell of a job to its folder and return the option of qsub that names it.

    Empty if the option does not support the folder's path, the user's template has no interpreter,
    or the request names a shell itself.
    """
    shell = job.directory / "shell"
    chosen = any(line.removeprefix("#PBS").split()[:1] == ["-S"] for line in job.request.extra)
    with job.script_path.open(encoding="utf-8", errors="surrogateescape") as script:
        mark, _, interpreter = script.readline().strip().partition("#!")
    command = f"{interpreter.strip()} {job.script_path}"
    if chosen or mark or not interpreter or not all(map(_PLAIN.fullmatch, command.split(" "))):
        return []
    write_file(shell, _SHELL.format(command=command))
    shell.chmod(0o755)
    return ["-S", str(shell)]


def parse_qsub(answer: Answer) -> str | None:
    """Return the job id, the last line that looks like one (sites print banners before it)."""
    words = [w.strip() for w in answer.out.splitlines() if re.match(r"\d+(\[\])?\.\S+$", w.strip())]
    return words[-1] if answer.code == 0 and words else None


def find(job: Job) -> str | None:
    """Return the id of a job whose submission was not confirmed; None if PBS knows none.

    Raises:
        LaunchError: PBS does not answer, or its answers do not cover all jobs of the user.
    """
    own, answer = _own_ids()
    shown = Qstat()
    for part in _queried(own, [job]):
        shown.add(part)
        if key := shown.outputs.get(_log(job)):
            return key
    if silence := shown.silence or (answer if own is None else None):
        raise no_answer("qstat" if shown.silence else "qselect", silence)
    hidden = [key for key in own or () if _is_hidden(key, shown)]
    if hidden:
        raise LaunchError(
            f"qstat's answer about job {hidden[0]}, which may be {job.id}, cannot be parsed. "
            "Try again later."
        )
    return None


def _own_ids() -> tuple[list[str] | None, Answer]:
    """Return the ids of the user's jobs, including ended ones; None: no answer."""
    answer = ask(["qselect", "-x", "-u", getpass.getuser()])
    return (answer.out.split() if answer.code == 0 else None), answer


def _queried(ids: Iterable[str] | None, jobs: Iterable[Job]) -> Iterator[Qstat]:
    """Query ids together, then each that the answer omits alone, the newest first.

    Current versions of qstat show only the first of several jobs as JSON. With None, query all
    jobs that have not ended. Stops at the first query without an answer.
    """
    tasks = ["-t"] if any(job.request.array for job in jobs) else []
    query = ["qstat", *tasks, "-f", "-F", "json"]
    if ids is None:
        yield parse_qstat(ask(query))
        return
    ids, total = list(ids), Qstat()
    for part in batches(ids):
        yield (shown := parse_qstat(ask([*query, "-x", *part])))
        total.add(shown)
        if shown.silence:
            return
    for key in reversed(ids):
        if not total.silence and not total.mentions(key):
            yield (shown := parse_qstat(ask([*query, "-x", key])))
            total.add(shown)


def _is_hidden(key: str, shown: Qstat) -> bool:
    """Return whether the answers do not identify this job of the user."""
    return bool(shown.why_unclear(key)) or not shown.mentions(key)


def refresh(jobs: Sequence[Job]) -> dict[str, Progress]:
    """Query qstat once for all jobs; first qselect, if a submission was not confirmed."""
    known = [job.progress.scheduler_id for job in jobs if job.progress.scheduler_id]
    strays = [job for job in jobs if not job.progress.scheduler_id]
    own, answer = _own_ids() if strays else ([], Answer(""))
    shown = Qstat()
    for part in _queried(dict.fromkeys([*known, *(own or [])]), jobs):
        shown.add(part)
        if all(map(shown.mentions, known)) and all(_log(job) in shown.outputs for job in strays):
            break  # the user's other jobs do not matter
    if own is None:
        for part in _queried(None, jobs):
            shown.add(part)
        shown.silence = shown.silence or answer
    hidden = any(_is_hidden(key, shown) for key in own or ())
    return {job.id: _news(job, shown, hidden) for job in jobs}


def _news(job: Job, shown: Qstat, hidden: bool) -> Progress:
    """Return the progress of one job after all answers, which omit a job if ``hidden``."""
    key = job.progress.scheduler_id or shown.outputs.get(_log(job))
    if key is None and shown.silence:
        return silent(job, "PBS", shown.silence)
    if key is None:
        return left_out(job, "PBS") if hidden else unconfirmed(job, "PBS")
    if why := shown.why_unclear(key):
        return unclear(job, why, shown.unread)
    new = array_progress(shown, key) if job.request.array else shown.get(key)
    if new is not None:
        return merged(job, new, key)
    if key in shown.unknown:
        return unknown(
            job,
            f"PBS knows no job {key}: a routing queue found no queue for it, or the server has "
            "deleted it. Check nodes and walltime, and submit it again",
        )
    return silent(job, "PBS", shown.silence) if shown.silence else left_out(job, "PBS")


def cancel(job: Job) -> None:
    """End the job and all its tasks with qdel; an ended or unknown job is not an error."""
    if key := job.progress.scheduler_id or find(job):
        run_cancel(["qdel", key], ("has finished", "Unknown Job Id"))


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
    shown = _read(answer.out)
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
            JobState.RUNNING, why=_RUNNING[letter], started_at=started, restarts=max(runs - 1, 0)
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


# An id as the key of an object. Quotes in a value follow a backslash.
_JOB = re.compile(r'(?<!\\)"([0-9]+(?:\[[0-9]*\])?\.[^"\\\s]+)"\s*:\s*(?=\{)')
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_BARE_END = re.compile(r'["{}\[\],\r\n]')
_END = re.compile(r"\}\s*\}\s*\}\s*\Z")  # closes a job, the jobs and the answer
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_DEEPEST = 20


@dataclass(frozen=True)
class _Shown:
    """The attributes of each job, by its id.

    ``unread``: jobs whose attributes cannot be read. ``complete``: false if the answer was
    truncated; the job in which it ends is then omitted.
    """

    jobs: Mapping[str, Mapping[str, Any]]
    unread: frozenset[str] = frozenset()
    complete: bool = True


def _read(text: str) -> _Shown | None:
    """Return the jobs in the output of ``qstat -f -F json``; None if none can be read.

    qstat writes values that look like numbers without quotes, exactly as the user wrote them: the
    variable ``RUN=005``, a job with the name ``nan``, an empty value. Its backslashes need not
    escape anything. If a value cannot be read at all, only the job that contains it is not read.
    Of a truncated answer, the complete jobs are read.
    """
    try:
        content = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return _pieces(text)
    if not isinstance(content, dict):
        return None
    listed = content.get("Jobs", {})
    listed = listed if isinstance(listed, dict) else {}
    jobs = {key: fields for key, fields in listed.items() if isinstance(fields, dict)}
    return _Shown(jobs, frozenset(listed) - frozenset(jobs))


def _pieces(text: str) -> _Shown | None:
    """Read each job separately, from its id to the next id."""
    heads = list(_JOB.finditer(text))
    if not heads:
        return None
    complete = _END.search(text) is not None
    jobs: dict[str, Mapping[str, Any]] = {}
    unread = set()
    for head, end in zip(heads, [*(head.start() for head in heads[1:]), len(text)], strict=True):
        try:
            jobs[head[1]], _ = _value(text[head.end() : end], 0, 0)
        except ValueError:
            if complete or end < len(text):
                unread.add(head[1])
    return _Shown(jobs, frozenset(unread), complete)


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Return the value that begins at a position, and the position after it.

    Raises:
        ValueError: there is no complete value.
    """
    at = _after_space(text, at)
    if depth > _DEEPEST:
        raise ValueError("too deep")
    if text.startswith(("{", "["), at):
        return _entries(text, at, depth)
    if text.startswith('"', at):
        return _string(text, at)
    end = _BARE_END.search(text, at)
    if end is None:
        raise ValueError("cut off")
    word = text[at : end.start()].strip()
    return (int(word) if _INTEGER.fullmatch(word) else word), end.start()


def _entries(text: str, at: int, depth: int) -> tuple[dict[str, Any] | list[Any], int]:
    """Return the object or list that begins at a position, and the position after it."""
    end = "}" if text[at] == "{" else "]"
    names, values = [], []
    at = _after_space(text, at + 1)
    while not text.startswith(end, at):
        if end == "}":
            name, at = _string(text, at)
            names.append(name)
            at = _past(text, at, ":")
        value, at = _value(text, at, depth + 1)
        values.append(value)
        at = _after_space(text, at)
        if not text.startswith(end, at):
            at = _after_space(text, _past(text, at, ","))
    return (dict(zip(names, values, strict=True)) if end == "}" else values), at + 1


def _string(text: str, at: int) -> tuple[str, int]:
    match = _STRING.match(text, _after_space(text, at))
    if match is None:
        raise ValueError("no string")
    return _ESCAPE.sub(_unescaped, match[1]), match.end()


def _unescaped(match: re.Match[str]) -> str:
    word = match[1]
    if word[0] == "u" and len(word) == 5:
        return chr(int(word[1:], 16))
    if word in '"\\/':
        return word
    return _ESCAPED.get(word, match[0])


def _past(text: str, at: int, mark: str) -> int:
    at = _after_space(text, at)
    if not text.startswith(mark, at):
        raise ValueError(f"no {mark}")
    return at + 1


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at
