"""OpenPBS and PBS Pro: qsub, qstat, qdel."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qsgd_hpc.jobs.model import Job, JobState, Progress
from qsgd_hpc.jobs.schedulers.command import Answer, ask, refusal, unknown

__all__ = ["Qstat", "cancel", "parse_qstat", "parse_qsub", "refresh", "submit"]

WALLTIME_EXIT = -29
SUBSTATE_CANCELLED = 91
_LIVE = {"R": JobState.RUNNING, "E": JobState.RUNNING, "B": JobState.RUNNING}
_WAITING = {"H": "held", "W": "waits for its start time", "S": "suspended", "U": "suspended"}

REMEDIES = (
    ("Account_Name", "Use --account PROJECT."),
    ("filesystems is required", "Use --filesystems with those that the job uses."),
    ("Unknown filesystem", "Use --filesystems with names that `qstat -Bf` lists."),
    ("Unknown queue", "Use --queue with a name that `qstat -Q` lists."),
    ("Access to queue is denied", "Submit to the queue that routes to it, or to another one."),
    ("resource limits", "Nodes or walltime are outside the queue's range; see `qstat -Qf`."),
    ("per-user limit", "Wait until one of your jobs there has ended, or use another --queue."),
    ("Unknown resource", "A directive of the site's profile is not known to this PBS."),
)


def submit(job: Job) -> Progress:
    """Hand the script to qsub; output goes to the job's directory."""
    argv = ["qsub", "-o", str(job.log_path), str(job.script_path)]
    answer = ask(argv, cwd=job.request.workdir)
    job_id = parse_qsub(answer)
    if job_id is None:
        raise refusal("qsub", answer, REMEDIES)
    return replace(job.progress, scheduler_id=job_id)


def parse_qsub(answer: Answer) -> str | None:
    """Return the job id, the last line that looks like one (sites print banners before it)."""
    words = [w.strip() for w in answer.out.splitlines() if re.match(r"\d+(\[\])?\.\S+$", w.strip())]
    return words[-1] if answer.code == 0 and words else None


class Qstat(dict[str, Progress]):
    """Progress by job id; ``unknown`` holds the ids that PBS says it does not know."""

    unknown: frozenset[str] = frozenset()


def refresh(jobs: Sequence[Job]) -> dict[str, Progress]:
    """Ask qstat once for all jobs."""
    by_id = {j.progress.scheduler_id: j for j in jobs if j.progress.scheduler_id}
    hint = "PBS did not confirm the submission; look for it with `qstat -u $USER`"
    found = {j.id: unknown(j, hint) for j in jobs if j.progress.scheduler_id is None}
    if not by_id:
        return found
    shown = parse_qstat(ask(["qstat", "-x", "-f", "-F", "json", *map(str, by_id)]))
    for key, job in by_id.items():
        if key in shown:
            found[job.id] = replace(shown[key], scheduler_id=key)
        elif key in shown.unknown:
            found[job.id] = unknown(
                job,
                f"PBS knows no job {key}: a routing queue found no queue for it, or the server "
                "forgot it. Check nodes and walltime and submit it again",
            )
    return found


def parse_qstat(answer: Answer) -> Qstat:
    """Return what ``qstat -x -f -F json`` says.

    Valid answers come with exit codes 35 and 153 too, so the code is not looked at.
    """
    result = Qstat()
    try:
        shown = json.loads(answer.out or "{}", strict=False).get("Jobs", {})
    except ValueError:
        shown = {}
    result.update({job_id: _progress(fields) for job_id, fields in shown.items()})
    result.unknown = frozenset(re.findall(r"Unknown Job Id (\S+)", answer.err))
    return result


def _progress(fields: Mapping[str, Any]) -> Progress:
    letter = fields.get("job_state", "Q")
    comment = fields.get("comment", "")
    started = _time(fields.get("stime", ""))
    if letter in _LIVE:
        return Progress(_LIVE[letter], started_at=started)
    if letter not in "FX":
        why = _WAITING.get(letter, comment)
        if "depend" in fields and letter == "H":
            why = f"waits for {fields['depend']}"
        return Progress(JobState.QUEUED, why=why)
    state, code, why = _ending(fields.get("Exit_status"), fields.get("substate"), comment)
    return Progress(state, code, why, started, _time(fields.get("obittime", "")))


def _ending(
    status: int | None, substate: int | None, comment: str
) -> tuple[JobState, int | None, str]:
    """Return state, exit code and reason of a finished job.

    A job cancelled while it ran carries Exit_status 0, so the substate is read first.
    """
    if substate == SUBSTATE_CANCELLED:
        return JobState.CANCELLED, None, comment or "cancelled"
    if status is None:
        return JobState.FAILED, None, comment or "it never ran: what it depends on failed"
    if status == WALLTIME_EXIT:
        return JobState.TIMEOUT, None, comment or "ended at its walltime"
    if status == 0:
        return JobState.COMPLETED, 0, ""
    if status < 0:
        return JobState.FAILED, None, comment or f"PBS could not run it (Exit_status {status})"
    number = status - 256 if status > 256 else status - 128
    try:
        why = f"ended by {signal.Signals(number).name}"
    except ValueError:
        why = f"the script ended with exit code {status}"
    return JobState.FAILED, 128 + number if status > 256 else status, why


def _time(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%a %b %d %H:%M:%S %Y"))
    except ValueError:
        return None


def cancel(job: Job) -> None:
    """Ask qdel to end the job; one that has finished meanwhile is no error."""
    answer = ask(["qdel", str(job.progress.scheduler_id)])
    if answer.code != 0 and "has finished" not in answer.err:
        raise refusal("qdel", answer, ())
