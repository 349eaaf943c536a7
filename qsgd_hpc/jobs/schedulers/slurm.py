"""Slurm: sbatch, squeue, sacct, scancel.

squeue answers for active jobs (``live``), sacct for ended ones (``past``).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs.events import node_words, task_progress
from qsgd_hpc.jobs.model import Job, JobState, Progress
from qsgd_hpc.jobs.schedulers.common import (
    Answer,
    Dependency,
    aggregate,
    ask,
    batches,
    condition,
    is_settled,
    mark,
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
from qsgd_hpc.jobs.schedulers.slurm_answers import (
    SACCT_COLUMNS,
    SQUEUE_COLUMNS,
    TIME_FORMAT,
    Squeue,
    candidates,
    cluster_name,
    cluster_of,
    hosts,
    number_of,
    option,
    parse_sacct,
    parse_squeue,
    within,
)
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
    ("Invalid node name", "Use names of nodes that `sinfo -N` lists in --exclude."),
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
    log = f"{folder}/{job.log_path_of('%a').name}"
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
    numbers = [replace(each, scheduler_id=number_of(each.scheduler_id)) for each in after]
    # Without the second option, a job whose condition can no longer become true waits forever.
    return [f"--dependency={condition(numbers)}", "--kill-on-invalid-dep=yes"] if after else []


# They would make a job an array, write its errors to another file, or make sbatch wait for its end.
_ALWAYS = frozenset({"SBATCH_ARRAY_INX", "SBATCH_ERROR", "SBATCH_WAIT"})
_REQUEUE = ("SBATCH_REQUEUE", "SBATCH_NO_REQUEUE")
_DIRECTIVE = re.compile(r"#SBATCH\s+(?:--([a-z][a-z-]*)|-([A-Za-z]))")
_LETTERS = {
    **{"A": "account", "C": "constraint", "J": "job-name"},
    **{"p": "partition", "q": "qos", "t": "time"},
}
# Other variables are named as their option.
_NAMED = {"time": ("SBATCH_TIMELIMIT",), "requeue": _REQUEUE, "no-requeue": _REQUEUE}
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


def parse_sbatch(answer: Answer) -> str | None:
    """Return the id that ``sbatch --parsable`` printed: ``42``, or ``42;gpu`` with the cluster."""
    lines = answer.out.strip().splitlines()
    if answer.code != 0 or not lines:
        return None
    match = re.fullmatch(r"\s*([0-9]+)(;[^\s;]+)?;?\s*", lines[-1])
    return f"{match[1]}{match[2] or ''}" if match else None


def find(job: Job) -> str | None:
    """Return the id of a job whose submission was not confirmed; None if Slurm knows none.

    Raises:
        LaunchError: Slurm does not answer.
    """
    clusters = candidates(job)
    answer = _squeue(clusters)
    live = parse_squeue(answer, clusters)
    if live is None or not live.covers(clusters):
        raise no_answer("squeue", answer)
    return _found_live(job, live) or _found_past([job], clusters).get(job.id)


def _found_live(job: Job, live: Squeue) -> str | None:
    return next((key for origin, key in live.origins.items() if _is_of(job, *origin)), None)


def _found_past(jobs: Sequence[Job], clusters: str) -> dict[str, str]:
    """Return ids of jobs that squeue no longer lists; sacct stores their submit commands."""
    if not jobs:
        return {}
    earliest = min(job.submitted_at for job in jobs)
    since = time.strftime(TIME_FORMAT, time.localtime(earliest - 60))
    found: dict[str, str] = {}
    columns = "JobID,Cluster,Comment,SubmitLine" if clusters else "JobID,Comment,SubmitLine"
    query = ["sacct", "-X", "-n", "-P", *option(clusters), "-S", since, "-o", columns]
    for line in _lines_of(query):
        number, _, rest = line.partition("|")
        cluster, _, rest = rest.partition("|") if clusters else ("", "", rest)
        comment, _, command = rest.partition("|")
        key = within(number.partition("_")[0], cluster)
        found |= {job.id: key for job in jobs if _is_of(job, comment, command)}
    return found


def _is_of(job: Job, comment: str, command: str) -> bool:
    """Return whether comment or command are those of the job: its mark, or its script's path."""
    path = str(job.script_path)
    return comment == mark(job.directory) or command == path or command.endswith(f" {path}")


def refresh(jobs: Sequence[Job]) -> dict[str, Progress]:
    """Query squeue once per cluster for all jobs, and sacct once for those that it omits."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(candidates(job), []).append(job)
    news: dict[str, Progress] = {}
    for clusters, members in groups.items():
        news |= _refreshed(members, clusters)
    return {job_id: _with_failed_nodes(progress) for job_id, progress in news.items()}


def _refreshed(jobs: Sequence[Job], clusters: str) -> dict[str, Progress]:
    answer = _squeue(clusters)
    live = parse_squeue(answer, clusters)
    if live is None:
        return {job.id: silent(job, "Slurm", answer) for job in jobs}
    ids = {job.id: _scheduler_id(job, clusters) or _found_live(job, live) for job in jobs}
    strays = [job for job in jobs if ids[job.id] is None and is_settled(job)]
    ids |= _found_past(strays, clusters)
    past, silence = _accounting(
        [key for job in jobs if (key := ids[job.id]) and _needs_accounting(job, key, live)]
    )
    return {job.id: _news(job, ids[job.id], clusters, live, past, silence) for job in jobs}


def _scheduler_id(job: Job, clusters: str) -> str | None:
    """Return the recorded id; add the cluster if the record has none."""
    key = job.progress.scheduler_id
    one = "," not in clusters and clusters != "all"
    return within(key, clusters) if key and one and not cluster_of(key) else key


def _accounting(keys: Sequence[str]) -> tuple[dict[str, Progress] | None, Answer]:
    """Return the progress from sacct by id; None and the failed answer if it does not answer."""
    past: dict[str, Progress] = {}
    answer = Answer("")
    for cluster in sorted({cluster_of(key) for key in keys}):
        numbers = [number_of(key) for key in keys if cluster_of(key) == cluster]
        for part in batches(numbers):
            query = ["sacct", "-X", "-n", "-P", "-D", *option(cluster), "-o", SACCT_COLUMNS]
            answer = ask([*query, "-j", ",".join(part)])
            found = parse_sacct(answer, cluster)
            if found is None:
                return None, answer
            past |= found
    return past, answer


def _news(
    job: Job,
    key: str | None,
    clusters: str,
    live: Squeue,
    past: Mapping[str, Progress] | None,
    silence: Answer,
) -> Progress:
    """Return the progress of one job after all answers to queries about these clusters."""
    cluster = cluster_of(key) if key else clusters
    if not live.covers(cluster):
        named = listing(sorted(map(cluster_name, live.clusters)), "and")
        return unclear(job, f"Slurm answers for {named} only, not for {cluster_name(cluster)}")
    if key is None:
        return unconfirmed(job, "Slurm")
    return replace(_news_of(job, key, live, past, silence), scheduler_id=key)


def _news_of(
    job: Job, key: str, live: Squeue, past: Mapping[str, Progress] | None, silence: Answer
) -> Progress:
    """Return the progress of the job with this id."""
    if past is not None and is_settled(job) and _is_omitted(job, key, live, past):
        again, silence = _queried_alone(job, key, live)
        if again is None:
            return silent(job, "Slurm", silence)
        past = {**past, **again}
    if word := next((live.unclear[one] for one in _ids_of(job, key) if one in live.unclear), ""):
        return unclear(job, f"Slurm reports an unknown state ({word})")
    new = _array(job, key, live, past) if job.request.array else _one(key, live, past)
    if new is not None:
        return merged(job, new, key)
    if past is None:
        return silent(job, "Slurm's accounting", silence)
    return unknown(job, f"Slurm no longer knows job {key}")


def _queried_alone(job: Job, key: str, live: Squeue) -> tuple[dict[str, Progress] | None, Answer]:
    """Query again a job that both answers omit, because one of them may be incomplete.

    Return the progress from sacct, or None and the failed answer; add that from squeue to ``live``.
    """
    past, answer = _accounting([key])
    if past is not None and _is_omitted(job, key, live, past):
        answer = _squeue(cluster_of(key), number_of(key))
        alone = parse_squeue(answer, cluster_of(key))
        if alone is None:
            return None, answer
        shown = {*alone, *alone.unclear}
        known = _has_waiting_tasks(key, shown) or not shown.isdisjoint(_ids_of(job, key))
        if not known and "Invalid job id" not in answer.err:
            return None, Answer("")  # it does not mention this job
        live.add(alone)
    return past, answer


def _squeue(clusters: str, number: str = "") -> Answer:
    """Query all jobs of the user, or a single one.

    All, because a list of ids may be too long, and squeue fails if it no longer knows the id in a
    query. With clusters, titles are requested, because they name the clusters.
    """
    titles = [] if clusters else ["-h"]
    which = ["-j", number] if number else ["--me"]
    query = ["squeue", *titles, "-r", *which, "-t", "all", *option(clusters)]
    return ask([*query, "-o", SQUEUE_COLUMNS])


def _with_failed_nodes(progress: Progress) -> Progress:
    """Return the progress, with the failed nodes of a job in state NODE_FAIL."""
    if progress.state is not JobState.NODE_FAIL or progress.bad_nodes:
        return progress
    nodes = _failed_nodes(str(progress.scheduler_id))
    return replace(progress, bad_nodes=nodes, why=node_words(nodes)) if nodes else progress


def _failed_nodes(key: str) -> tuple[str, ...]:
    """Return the nodes that Slurm names as failed, else nodes of the job that are down now."""
    where = option(cluster_of(key))
    query = ["sacct", "-X", "-n", "-P", *where, "-j", number_of(key), "-o"]
    named = {node for line in _lines_of([*query, "FailedNode"]) for node in hosts(line)}
    if named:  # older versions do not have this column
        return tuple(sorted(named))
    mine = sorted({node for line in _lines_of([*query, "NodeList"]) for node in hosts(line)})
    down = ["sinfo", "-h", "-N", *where, "-o", "%N", "-t", "down,drain,fail", "-n", ",".join(mine)]
    return tuple(sorted({*_lines_of(down)} & {*mine})) if mine else ()


def _lines_of(argv: Sequence[str]) -> list[str]:
    """Return the lines that a query prints; none if it fails."""
    answer = ask(argv)
    return [line.strip() for line in answer.out.splitlines()] if answer.code == 0 else []


def _ids_of(job: Job, key: str) -> list[str]:
    """Return the ids under which Slurm lists a job: its own, or those of its tasks."""
    if not job.request.array:
        return [key]
    number, cluster = number_of(key), cluster_of(key)
    return [within(f"{number}_{index}", cluster) for index in range(len(job.request.tasks))]


def _needs_accounting(job: Job, key: str, live: Squeue) -> bool:
    """Return whether accounting is needed for the end of the job, or of one of its tasks."""
    keys = [one for one in _ids_of(job, key) if one not in live.unclear]
    return any(one not in live or live[one].state.ended for one in keys)


def _is_omitted(job: Job, key: str, live: Squeue, past: Mapping[str, Progress]) -> bool:
    """Return whether both answers omit the job, or one of its tasks."""
    known = {*live, *live.unclear, *past}
    return not _has_waiting_tasks(key, known) and any(one not in known for one in _ids_of(job, key))


def _has_waiting_tasks(key: str, known: Iterable[str]) -> bool:
    """Return whether tasks of an array are listed together, as those that have not started are."""
    head, cluster = f"{number_of(key)}_[", cluster_of(key)
    return any(one.startswith(head) and cluster_of(one) == cluster for one in known)


def _one(
    key: str, live: Mapping[str, Progress], past: Mapping[str, Progress] | None
) -> Progress | None:
    """Return the progress of a plain job, or of one task; None: unknown, or accounting is down.

    squeue is used for active jobs, sacct for ended ones. If sacct lags behind, the job remains
    active for a moment, instead of ending permanently without an exit code.
    """
    now, then = live.get(key), (past or {}).get(key)
    if now is None or (now.state.ended and then is not None):
        return then
    if now.state is JobState.COMPLETED:
        return replace(now, exit_code=0)
    if now.state.ended and past is None:
        return None  # wait for its exit code
    return now


def _array(
    job: Job, key: str, live: Squeue, past: Mapping[str, Progress] | None
) -> Progress | None:
    """Return the progress of an array from its tasks; None: unknown, or accounting is down."""
    pending = _has_waiting_tasks(key, {*live, *(past or {})})
    tasks: dict[int, Progress] = {}
    for index, one in enumerate(_ids_of(job, key)):
        known = _one(one, live, past)
        if known is None and past is None:
            return None
        if known is None and not pending:
            own = task_progress(job, index)  # Slurm without accounting soon deletes ended tasks
            lost = Progress(JobState.LOST, why="Slurm no longer knows this task")
            known = own if own.state.ended else lost
        tasks[index] = known or Progress()
    if all(progress.state is JobState.LOST for progress in tasks.values()):
        return None
    return aggregate(tasks)


def cancel(job: Job) -> None:
    """End the job and all its tasks with scancel; an ended or unknown job is not an error."""
    if key := _scheduler_id(job, candidates(job)) or find(job):
        run_cancel(
            ["scancel", *option(cluster_of(key)), number_of(key)],
            ("Invalid job id", "already completing or completed"),
        )
