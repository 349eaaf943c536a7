"""OpenPBS and PBS Pro: qsub, qstat, qselect, qdel."""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterable, Iterator, Sequence

from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs.model import Job, Progress
from qsgd_hpc.jobs.records.registry import write_file
from qsgd_hpc.jobs.schedulers.command import (
    Answer,
    Dependency,
    ask,
    batches,
    log_path,
    no_answer,
    of_kind,
    refusal,
    run_cancel,
    submitted,
)
from qsgd_hpc.jobs.schedulers.pbs_answers import Qstat, array_progress, parse_qstat
from qsgd_hpc.jobs.schedulers.progress import (
    left_out,
    merged,
    silent,
    unclear,
    unconfirmed,
    unknown,
)

__all__ = ["cancel", "find", "parse_qsub", "refresh", "submit"]

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


def submit(job: Job, after: Sequence[Dependency] = ()) -> Progress:
    """Submit the script with qsub; output is in the job's directory."""
    argv = ["qsub", "-o", _log(job), *_depends(after), *_shell_option(job), str(job.script_path)]
    answer = ask(argv, cwd=job.request.workdir)
    return submitted(job, parse_qsub(answer), refusal("qsub", answer, REMEDIES), find)


def _log(job: Job) -> str:
    return str(log_path(job, "^array_index^"))


def _depends(after: Sequence[Dependency]) -> list[str]:
    kinds = (("afterok", of_kind(after, "ok")), ("afterany", of_kind(after, "any")))
    terms = [":".join((word, *ids)) for word, ids in kinds if ids]
    return ["-W", f"depend={','.join(terms)}"] if terms else []


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
