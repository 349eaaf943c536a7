"""Slurm: sbatch, squeue, sacct, scancel."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from qsgd_hpc.jobs.model import Job, JobState, Progress
from qsgd_hpc.jobs.schedulers.command import Answer, ask, refusal, unknown

__all__ = ["cancel", "parse_sacct", "parse_sbatch", "parse_squeue", "refresh", "submit"]

_STATES = {
    JobState.QUEUED: "PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT "
    "SUSPENDED STOPPED RESV_DEL_HOLD",
    JobState.RUNNING: "RUNNING COMPLETING SIGNALING STAGE_OUT RESIZING",
    JobState.COMPLETED: "COMPLETED",
    JobState.CANCELLED: "CANCELLED REVOKED",
    JobState.TIMEOUT: "TIMEOUT DEADLINE",
    JobState.FAILED: "FAILED BOOT_FAIL NODE_FAIL OUT_OF_MEMORY PREEMPTED LAUNCH_FAILED",
}
STATES = {word: state for state, words in _STATES.items() for word in words.split()}

REMEDIES = (
    ("Invalid account", "Use --account with a project of yours; `sacctmgr show assoc user=$USER`."),
    ("Invalid qos", "Use --queue with a QOS that the account may use."),
    ("Invalid partition", "Use --queue with a partition that `sinfo` lists."),
    ("QOSMaxWallDurationPerJobLimit", "Use a shorter --walltime, or another --queue."),
    ("Requested time limit is invalid", "Use a shorter --walltime, or another --queue."),
    ("Invalid --time", "Use --walltime such as 30m or 1:00:00."),
    ("Node count", "Use fewer --nodes, or another --queue."),
    ("Requested node configuration", "Use fewer --nodes or --ranks-per-node."),
    ("More processors requested", "Use fewer --nodes or --ranks-per-node."),
    ("Invalid feature", "The profile's --constraint is not known here; see `sinfo -o %f`."),
    ("accounting/QOS policy", "Another --queue, fewer --nodes or a shorter --walltime may fit."),
)


def submit(job: Job) -> Progress:
    """Hand the script to sbatch; output goes to the job's directory."""
    # A percent sign starts a pattern in file names of sbatch.
    log = str(job.log_path).replace("%", "%%")
    argv = ["sbatch", "--parsable", f"--output={log}", str(job.script_path)]
    answer = ask(argv, cwd=job.request.workdir)
    job_id = parse_sbatch(answer)
    if job_id is None:
        raise refusal("sbatch", answer, REMEDIES)
    return replace(job.progress, scheduler_id=job_id)


def parse_sbatch(answer: Answer) -> str | None:
    """Return the job id that ``sbatch --parsable`` printed, without the cluster's name."""
    lines = answer.out.strip().splitlines()
    if answer.code != 0 or not lines:
        return None
    job_id = lines[-1].split(";")[0].strip()
    return job_id if job_id.isdigit() else None


def refresh(jobs: Sequence[Job]) -> dict[str, Progress]:
    """Ask squeue once for all jobs, and sacct once for those that it has forgotten."""
    by_id = {job.progress.scheduler_id: job for job in jobs if job.progress.scheduler_id}
    hint = "Slurm did not confirm the submission; look for it with `squeue --me`"
    found = {j.id: unknown(j, hint) for j in jobs if j.progress.scheduler_id is None}
    if not by_id:
        return found
    listed = ",".join(str(key) for key in by_id)
    shown = ask(["squeue", "-h", "-t", "all", "-o", "%i|%T|%r", "-j", listed])
    live = parse_squeue(shown)
    rest = [key for key in by_id if live is None or key not in live or live[key].state.ended]
    old: dict[str, Progress] | None = {}
    if rest:
        fields = "JobID,State,ExitCode,Start,End,Elapsed,NNodes,NodeList,Reason"
        old = parse_sacct(
            ask(["sacct", "-X", "-n", "-P", "-o", fields, "-j", ",".join(map(str, rest))])
        )
    for key, job in by_id.items():
        new = (old or {}).get(str(key)) or (live or {}).get(str(key))
        if new is not None:
            started = new.started_at or job.progress.started_at
            found[job.id] = replace(new, scheduler_id=key, started_at=started)
        elif live is not None and old is not None:
            found[job.id] = unknown(job, f"Slurm knows no job {key} any more")
    return found


def parse_squeue(answer: Answer) -> dict[str, Progress] | None:
    """Return progress by job id; None when Slurm did not answer.

    A job that squeue has forgotten is simply absent; asked for it alone, squeue fails with
    "Invalid job id", which is an answer too.
    """
    if answer.code != 0:
        return {} if "Invalid job id" in answer.err else None
    found = {}
    for line in answer.out.splitlines():
        # Reasons hold commas and colons; the columns after the third are of no interest here.
        job_id, state, *rest = line.split("|")
        reason = rest[0] if rest and rest[0] != "None" else ""
        found[job_id.strip()] = Progress(_state(state), why=_explained(reason))
    return found


def parse_sacct(answer: Answer) -> dict[str, Progress] | None:
    """Return progress by job id; the last line of a job that was requeued counts.

    A Slurm without accounting knows nothing about the past, which is an answer too.
    """
    if answer.code != 0:
        return {} if "accounting storage is disabled" in answer.err else None
    found = {}
    for line in answer.out.splitlines():
        job_id, word, code_text, *rest = line.split("|")
        state = _state(word)
        started, ended = (_time(text) for text in (rest[:2] if len(rest) > 2 else ("", "")))
        code, _, number = code_text.partition(":")
        why = word if state in (JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT) else ""
        exit_code = int(code) if state in (JobState.COMPLETED, JobState.FAILED) else None
        if state is JobState.FAILED and exit_code:
            why = f"the script ended with exit code {exit_code}"
        elif state is JobState.FAILED and number not in ("", "0"):
            exit_code, why = 128 + int(number), f"ended by {_signal(int(number))}"
        elif not state.ended and rest and rest[-1] not in ("None", "00:00:00"):
            why = _explained(rest[-1]) if len(rest) > 2 else ""
        found[job_id] = Progress(state, exit_code, why, started, ended)
    return found


def _state(word: str) -> JobState:
    """Return the state for words such as ``CANCELLED by 1000``; an unknown word means it lives."""
    return STATES.get(word.split()[0].rstrip("+"), JobState.QUEUED) if word else JobState.QUEUED


def _explained(reason: str) -> str:
    if reason == "DependencyNeverSatisfied":
        return f"{reason}: it will never start; cancel it"
    return reason


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _time(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None  # "Unknown", or a column of an older sacct


def cancel(job: Job) -> None:
    """Ask scancel to end the job; an ended or unknown one is no error there."""
    answer = ask(["scancel", str(job.progress.scheduler_id)])
    if answer.code != 0:
        raise refusal("scancel", answer, ())
