"""Slurm: sbatch, squeue, sacct, scancel."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs.model import Job, Progress
from qsgd_hpc.jobs.schedulers.command import (
    Answer,
    Dependency,
    ask,
    log_path,
    of_kind,
    refusal,
    run_cancel,
    submitted,
)
from qsgd_hpc.jobs.schedulers.slurm_clusters import (
    candidates,
    cluster_of,
    number_of,
    option,
)
from qsgd_hpc.jobs.schedulers.slurm_progress import cluster_name, find, refresh, scheduler_id
from qsgd_hpc.jobs.words import listing
from qsgd_hpc.launch.claims import OF_ONE_RANK

__all__ = ["cancel", "find", "parse_sbatch", "refresh", "submit"]

REMEDIES = (
    (
        "Invalid account",
        "Use --account with one of your projects; see `sacctmgr show assoc user=$USER`.",
    ),
    ("Invalid qos", "Use --queue with a QOS that is available to the account."),
    ("Invalid partition", "Use --queue with a partition that `sinfo` lists."),
    ("QOSMaxWallDurationPerJobLimit", "Use a shorter --walltime, or another --queue."),
    ("Requested time limit is invalid", "Use a shorter --walltime, or another --queue."),
    ("Invalid --time", "Use --walltime such as 30m or 1:00:00."),
    ("Node count", "Use fewer --nodes, or another --queue."),
    ("Requested node configuration", "Use fewer --nodes or --ranks-per-node."),
    ("More processors requested", "Use fewer --nodes or --ranks-per-node."),
    ("Invalid feature", "The profile's --constraint is not known here; see `sinfo -o %f`."),
    ("accounting/QOS policy", "Another --queue, fewer --nodes or a shorter --walltime may fit."),
    ("Job dependency problem", "Slurm no longer knows a job of --after; remove it."),
    ("Invalid job array", "Use fewer values of --array; `scontrol show config` has MaxArraySize."),
    ("for --cluster", "It is down, or there is no cluster of that name; nothing was submitted."),
    ("Unable to contact slurm controller", "Slurm is down; nothing was submitted. Try it later."),
)


def submit(job: Job, after: Sequence[Dependency] = ()) -> Progress:
    """Submit the script with sbatch; output is in the job's directory."""
    # A percent sign starts a pattern in file names of sbatch.
    folder = str(job.directory).replace("%", "%%")
    log = f"{folder}/{log_path(job, '%a').name}"
    argv = ["sbatch", "--parsable", f"--output={log}", *option(_target(job, after))]
    script = job.script_path.read_text("utf-8", "surrogateescape")
    answer = ask(
        [*argv, *_depends(after), str(job.script_path)],
        cwd=job.request.workdir,
        without=_overriding_variables(script, os.environ),
    )
    return submitted(job, parse_sbatch(answer), refusal("sbatch", answer, REMEDIES), find)


def _target(job: Job, after: Sequence[Dependency]) -> str:
    """Return the clusters in which the job may run: that of its dependencies, if there are any."""
    allowed = candidates(job)
    others = {cluster_of(dependency.scheduler_id) for dependency in after}
    if len(others) > 1 or (others and allowed != "all" and not others <= {*allowed.split(",")}):
        named = listing(sorted(map(cluster_name, others)), "and")
        raise LaunchError(
            f"sbatch refused the job: it would run in {cluster_name(allowed)} and wait for jobs in "
            f"{named}, which Slurm does not support. Use one cluster for all, or remove --after."
        )
    return next(iter(others), allowed)


def _depends(after: Sequence[Dependency]) -> list[str]:
    kinds = (("afterok", of_kind(after, "ok")), ("afterany", of_kind(after, "any")))
    terms = [":".join((word, *map(number_of, ids))) for word, ids in kinds if ids]
    # Without the second option, a job whose condition can no longer become true waits forever.
    return [f"--dependency={','.join(terms)}", "--kill-on-invalid-dep=yes"] if terms else []


def parse_sbatch(answer: Answer) -> str | None:
    """Return the id that ``sbatch --parsable`` printed: ``42``, or ``42;gpu`` with the cluster."""
    lines = answer.out.strip().splitlines()
    if answer.code != 0 or not lines:
        return None
    match = re.fullmatch(r"\s*([0-9]+)(;[^\s;]+)?;?\s*", lines[-1])
    return f"{match[1]}{match[2] or ''}" if match else None


def cancel(job: Job) -> None:
    """End the job and all its tasks with scancel; an ended or unknown job is not an error."""
    if key := scheduler_id(job, candidates(job)) or find(job):
        run_cancel(
            ["scancel", *option(cluster_of(key)), number_of(key)],
            ("Invalid job id", "already completing or completed"),
        )


# They would make a job an array, write its errors to another file, or make sbatch wait for its end.
_ALWAYS = frozenset({"SBATCH_ARRAY_INX", "SBATCH_ERROR", "SBATCH_WAIT"})
_REQUEUE = ("SBATCH_REQUEUE", "SBATCH_NO_REQUEUE")
_DIRECTIVE = re.compile(r"#SBATCH\s+(?:--([a-z][a-z-]*)|-([A-Za-z]))")
_LETTERS = {
    "A": "account",
    "C": "constraint",
    "J": "job-name",
    "p": "partition",
    "q": "qos",
    "t": "time",
}
# Other variables are named as their option.
_NAMED = {
    "time": ("SBATCH_TIMELIMIT",),
    "requeue": _REQUEUE,
    "no-requeue": _REQUEUE,
}
# How Slurm is reached, whatever job this is.
_OF_THE_MACHINE = re.compile(r"SLURM_(CONF\w*|JWT|SACK\w*)")


def _overriding_variables(script: str, environ: Mapping[str, str]) -> frozenset[str]:
    """Return the user's variables that would override directives of a job script.

    sbatch reads its options, then variables such as SBATCH_ACCOUNT, then the directives of the
    script. A variable in the user's profile would thus override what the script, and the request,
    say.

    sbatch also passes its variables to the job. In a job that another one submits, srun would read
    the other's cores, memory and GPUs from SLURM_CPU_BIND, SLURM_MEM_PER_CPU and the like.
    """
    found = set(_ALWAYS)
    if "SLURM_JOB_ID" in environ:
        found.update(
            name
            for name in environ
            if OF_ONE_RANK.fullmatch(name)
            or (name.startswith("SLURM_") and not _OF_THE_MACHINE.fullmatch(name))
        )
    for match in map(_DIRECTIVE.match, script.splitlines()):
        name = match and (match[1] or _LETTERS.get(match[2]))
        if name:
            found.update(_NAMED.get(name, (f"SBATCH_{name.replace('-', '_').upper()}",)))
    return frozenset(found)
