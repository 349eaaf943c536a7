"""Slurm: sbatch, squeue, sacct, scancel."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from qsgd_hpc.jobs.model import Job, JobState, Progress
from qsgd_hpc.jobs.schedulers.arrays import aggregate
from qsgd_hpc.jobs.schedulers.command import (
    Answer,
    Dependency,
    ask,
    batches,
    log_path,
    mark,
    no_answer,
    not_cancelled,
    of_kind,
    refusal,
    submitted,
)
from qsgd_hpc.jobs.schedulers.news import (
    is_settled,
    merged,
    open_jobs,
    silent,
    unconfirmed,
    unknown,
)
from qsgd_hpc.jobs.schedulers.slurm_answers import (
    SACCT_COLUMNS,
    SQUEUE_COLUMNS,
    Squeue,
    parse_sacct,
    parse_squeue,
)
from qsgd_hpc.jobs.schedulers.slurm_nodes import blamed, lines_of

__all__ = ["cancel", "find", "parse_sbatch", "refresh", "submit"]

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
    ("Job dependency problem", "A job of --after is not known to Slurm any more; leave it out."),
    ("Invalid job array", "Use fewer values of --array; `scontrol show config` has MaxArraySize."),
    ("Unable to contact slurm controller", "Slurm is down; nothing was submitted. Try it later."),
)


def submit(job: Job, after: Sequence[Dependency] = ()) -> Progress:
    """Hand the script to sbatch; output goes to the job's directory."""
    # A percent sign starts a pattern in file names of sbatch.
    folder = str(job.directory).replace("%", "%%")
    log = f"{folder}/{log_path(job, '%a').name}"
    argv = ["sbatch", "--parsable", f"--output={log}", *_depends(after), str(job.script_path)]
    answer = ask(argv, cwd=job.request.workdir)
    return submitted(job, parse_sbatch(answer), refusal("sbatch", answer, REMEDIES), find)


def _depends(after: Sequence[Dependency]) -> list[str]:
    kinds = (("afterok", of_kind(after, "ok")), ("afterany", of_kind(after, "any")))
    terms = [":".join((word, *ids)) for word, ids in kinds if ids]
    # Without the second option, a job whose condition cannot come true any more waits for ever.
    return [f"--dependency={','.join(terms)}", "--kill-on-invalid-dep=yes"] if terms else []


def parse_sbatch(answer: Answer) -> str | None:
    """Return the job id that ``sbatch --parsable`` printed, without the cluster's name."""
    lines = answer.out.strip().splitlines()
    if answer.code != 0 or not lines:
        return None
    job_id = lines[-1].split(";")[0].strip()
    return job_id if job_id.isascii() and job_id.isdigit() else None


def find(job: Job) -> str | None:
    """Return the id of a job whose submission nobody confirmed; None when Slurm knows none.

    Raises:
        LaunchError: Slurm does not answer.
    """
    answer = _squeue()
    live = parse_squeue(answer)
    if live is None:
        raise no_answer("squeue", answer)
    return _found_live(job, live) or _found_past([job]).get(job.id)


def _found_live(job: Job, live: Squeue) -> str | None:
    return next((key for origin, key in live.origins.items() if _is_of(job, *origin)), None)


def _found_past(jobs: Sequence[Job]) -> dict[str, str]:
    """Look among the jobs that squeue has forgotten; sacct keeps how each was submitted."""
    if not jobs:
        return {}
    earliest = min(job.submitted_at for job in jobs)
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(earliest - 60))
    found: dict[str, str] = {}
    query = ["sacct", "-X", "-n", "-P", "-S", since, "-o", "JobID,Comment,SubmitLine"]
    for line in lines_of(query):
        key, comment, command = (*line.split("|", 2), "", "")[:3]
        found |= {job.id: key.partition("_")[0] for job in jobs if _is_of(job, comment, command)}
    return found


def _is_of(job: Job, comment: str, command: str) -> bool:
    """Tell whether this is the job, by a comment in its script or by the script's own path."""
    path = str(job.script_path)
    return comment == mark(job.directory) or command == path or command.endswith(f" {path}")


def refresh(jobs: Sequence[Job]) -> dict[str, Progress]:
    """Ask squeue once for all jobs of the user, and sacct once for those that it has forgotten."""
    jobs = open_jobs(jobs)
    if not jobs:
        return {}
    answer = _squeue()
    live = parse_squeue(answer)
    if live is None:
        return {job.id: silent(job, "Slurm", answer) for job in jobs}
    ids = {job.id: job.progress.scheduler_id or _found_live(job, live) for job in jobs}
    ids |= _found_past([job for job in jobs if ids[job.id] is None and is_settled(job)])
    past, silence = _accounting(
        [key for job in jobs if (key := ids[job.id]) and _is_over(job, key, live)]
    )
    return blamed({job.id: _news(job, ids[job.id], live, past, silence) for job in jobs})


def _accounting(keys: Sequence[str]) -> tuple[dict[str, Progress] | None, Answer]:
    """Return what sacct says, asked once if the ids fit; None, and why, when it does not answer."""
    past: dict[str, Progress] = {}
    answer = Answer("")
    for part in batches(keys):
        listed = ",".join(part)
        answer = ask(["sacct", "-X", "-n", "-P", "-D", "-o", SACCT_COLUMNS, "-j", listed])
        found = parse_sacct(answer)
        if found is None:
            return None, answer
        past |= found
    return past, answer


def _news(
    job: Job,
    key: str | None,
    live: Squeue,
    past: Mapping[str, Progress] | None,
    silence: Answer,
) -> Progress:
    """Return the progress of one job after all answers."""
    if key is None:
        return unconfirmed(job, "Slurm")
    new = _array(job, key, live, past) if job.request.array else _one(key, live, past)
    if new is not None:
        return merged(job, new, key)
    kept = job.progress
    if past is None:
        kept = silent(job, "Slurm's accounting", silence)
    elif key not in live.unclear:
        kept = unknown(job, f"Slurm knows no job {key} any more")
    return replace(kept, scheduler_id=key)


def _squeue() -> Answer:
    # All jobs of the user, not a list of ids: no such list can be too long, and squeue asked for a
    # single id that it has forgotten fails.
    return ask(["squeue", "-h", "-r", "--me", "-t", "all", "-o", SQUEUE_COLUMNS])


def _keys(job: Job, key: str) -> list[str]:
    """Return the ids under which Slurm lists a job: its own, or those of its tasks."""
    tasks = range(len(job.request.tasks))
    return [f"{key}_{index}" for index in tasks] if job.request.array else [key]


def _is_over(job: Job, key: str, live: Squeue) -> bool:
    """Tell whether accounting has to say how the job, or a task of it, has ended."""
    keys = [one for one in _keys(job, key) if one not in live.unclear]
    return any(one not in live or live[one].state.ended for one in keys)


def _one(
    key: str, live: Mapping[str, Progress], past: Mapping[str, Progress] | None
) -> Progress | None:
    """Return what both say about one job; None when neither knows, or accounting is down.

    squeue is right about what lives, sacct about how it has ended: where sacct lags behind, the job
    goes on for a moment, instead of ending for ever without an exit code.
    """
    now, then = live.get(key), (past or {}).get(key)
    if now is None or (now.state.ended and then is not None):
        return then
    if now.state is JobState.COMPLETED:
        return replace(now, exit_code=0)
    if now.state.ended and past is None:
        return None  # its exit code is worth waiting for
    return now


def _array(
    job: Job, key: str, live: Squeue, past: Mapping[str, Progress] | None
) -> Progress | None:
    """Return the progress of an array from that of its tasks; None when not all can be told."""
    pending = any(one.startswith(f"{key}_[") for one in {*live, *(past or {})})
    tasks: dict[int, Progress] = {}
    for index, one in enumerate(_keys(job, key)):
        known = _one(one, live, past)
        if known is None and past is None:
            return None
        if known is None and (pending or one in live.unclear):
            known = Progress()
        tasks[index] = known or Progress(JobState.LOST, why="Slurm knows no such task any more")
    if all(progress.state is JobState.LOST for progress in tasks.values()):
        return None
    return aggregate(tasks)


def cancel(job: Job) -> None:
    """Ask scancel to end the job with all its tasks; an ended or unknown one is no error."""
    key = job.progress.scheduler_id or find(job)
    if key is None:
        return
    answer = ask(["scancel", key])
    if answer.code != 0 and not any(words in answer.err for words in _NOTHING_TO_CANCEL):
        raise not_cancelled("scancel", answer)


_NOTHING_TO_CANCEL = ("Invalid job id", "already completing or completed")
