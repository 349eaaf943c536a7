"""Slurm: its ids and clusters, and the output of squeue and sacct as progress. Pure.

``sbatch --clusters`` prints ids such as ``8653762;gpu``, which are recorded in this form. An id
without a cluster is of the default cluster, to which Slurm's commands send queries without options.
Numbers are not unique: job 11 of one cluster is not job 11 of another.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from qsgd_hpc.jobs.events import NO_MEMORY, PREEMPTED, WALLTIME, exit_words, node_words
from qsgd_hpc.jobs.model import Job, JobRequest, JobState, Progress
from qsgd_hpc.jobs.schedulers.common import Answer, epoch_s

__all__ = [
    "SACCT_COLUMNS",
    "SQUEUE_COLUMNS",
    "TIME_FORMAT",
    "Squeue",
    "candidates",
    "cluster_name",
    "cluster_of",
    "hosts",
    "number_of",
    "option",
    "parse_sacct",
    "parse_squeue",
    "with_choice",
    "within",
]

# Id, state, reason, nodes, start, comment, command; the last two may contain a bar.
SQUEUE_COLUMNS = "%i|%T|%r|%N|%S|%k|%o"
SACCT_COLUMNS = "JobID,State,ExitCode,Start,End,Elapsed,NNodes,NodeList,Reason"
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"  # or a word, such as "Unknown"

_STATES = {
    JobState.QUEUED: "PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT "
    "RESV_DEL_HOLD",
    JobState.RUNNING: "RUNNING COMPLETING SIGNALING STAGE_OUT RESIZING SUSPENDED STOPPED",
    JobState.COMPLETED: "COMPLETED",
    JobState.CANCELLED: "CANCELLED REVOKED",
    JobState.TIMEOUT: "TIMEOUT DEADLINE",
    JobState.NODE_FAIL: "NODE_FAIL BOOT_FAIL",
    JobState.FAILED: "FAILED OUT_OF_MEMORY PREEMPTED LAUNCH_FAILED",
}
STATES = {word: state for state, words in _STATES.items() for word in words.split()}
_PAUSED = {
    "SUSPENDED": "suspended, perhaps for a job of higher priority",
    "STOPPED": "stopped by SIGSTOP; it keeps its nodes",
}
_ENDS = {
    "TIMEOUT": WALLTIME,
    "DEADLINE": "its deadline passed",
    "OUT_OF_MEMORY": NO_MEMORY,
    "PREEMPTED": PREEMPTED,
    "LAUNCH_FAILED": "Slurm could not launch it on its nodes",
    "CANCELLED": "by Slurm: perhaps a job that it waited for did not complete",
}
# The exit code of a job whose output file or folder Slurm could not open on the first node.
NOT_STARTED = (0, 53)
UNREACHABLE = (
    "Slurm could not open the job's folder or its output on the node: QSGD_HOME and --workdir must "
    "be on a file system that nodes share"
)
_REASONS = {
    "BeginTime": "waits for its start time; a requeued job waits two minutes",
    "Dependency": "waits for other jobs to end",
    "DependencyNeverSatisfied": "a job that it waits for did not complete: "
    "it will never start; cancel it",
    "JobHeldAdmin": "held by an administrator of the machine",
    "JobHeldUser": "held by its user; release it with `scontrol release`",
    "JobHoldMaxRequeue": "held: it was requeued too often",
    "Priority": "waits for jobs of higher priority",
    "Resources": "waits for free nodes",
}
# A job, a part of a heterogeneous job, a task of an array, or its tasks that have not started.
_ID = re.compile(r"\d+(\+\d+|_\d+|_\[[^\]|]*\])?")
_CLUSTER = re.compile(r"CLUSTER: (\S+)\s*")
_TITLES = "JOBID|STATE|"


class Squeue(dict[str, Progress]):
    """Progress by job id (``11_2`` for a task of an array, ``11;gpu`` in another cluster).

    ``unclear``: names of unknown states, by job id. ``origins``: job ids, by (comment, command) of
    the submission. ``clusters``: the clusters that the answer names; none if it names no cluster.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unclear: dict[str, str] = {}
        self.origins: dict[tuple[str, str], str] = {}
        self.clusters: set[str] = set()

    def covers(self, clusters: str) -> bool:
        """Return whether the answer covers these clusters; true if it names no cluster."""
        named = self.clusters
        return not named or clusters == "all" or named.issuperset(clusters.split(","))

    def add(self, other: Squeue) -> None:
        """Add the answer to a later query."""
        self.update(other)
        self.unclear |= other.unclear
        self.clusters |= other.clusters


def parse_squeue(answer: Answer, cluster: str = "") -> Squeue | None:
    """Return the jobs that ``squeue -o SQUEUE_COLUMNS`` shows; None if Slurm did not answer.

    A job that squeue no longer knows is omitted. A query for such a job alone fails with "Invalid
    job id", which is also a valid answer.

    Args:
        answer: the output of squeue; it may have a title line for each cluster.
        cluster: the queried cluster, to which jobs before the first title belong.
    """
    found = Squeue()
    if answer.code != 0:
        return found if "Invalid job id" in answer.err else None
    strange = False
    for line in answer.out.splitlines(keepends=True):
        if section := _CLUSTER.fullmatch(line):
            cluster = section[1]
            found.clusters.add(cluster)
            continue
        cells = line.rstrip("\r\n").split("|", 6)
        if not _is_row(cells) or (len(cells) < 7 and not line.endswith("\n")):
            strange |= bool(line.strip()) and not line.startswith(_TITLES)
            continue
        number, state, reason, _, start, comment, command = (*cells, "", "", "", "", "")[:7]
        key = within(number.strip(), cluster)
        if (known := _state(state)) is None:
            found.unclear[key] = state.strip()
        else:
            started = None if known is JobState.QUEUED else epoch_s(start, TIME_FORMAT)
            found[key] = Progress(known, why=_why_so_far(state, reason), started_at=started)
        found.origins[comment, command] = within(number.strip().partition("_")[0], cluster)
    nothing = not found and not found.unclear and not found.clusters
    return None if nothing and (strange or "error" in answer.err) else found


def parse_sacct(answer: Answer, cluster: str = "") -> dict[str, Progress] | None:
    """Return progress by job id from ``sacct -X -n -P -D -o SACCT_COLUMNS`` of one cluster.

    Each run of a requeued job has a line; the last one is used. None: Slurm's accounting did not
    answer. Slurm without accounting has no records, so the result is empty.
    """
    if answer.code != 0:
        return {} if "accounting storage is disabled" in answer.err else None
    found: dict[str, Progress] = {}
    runs: dict[str, int] = {}
    for line in answer.out.splitlines(keepends=True):
        cells = line.rstrip("\r\n").split("|")
        if not _is_row(cells) or len(cells) < 3 or not re.fullmatch(r"\d{1,9}:\d{1,9}", cells[2]):
            continue
        if len(cells) < 9 and not line.endswith("\n"):
            continue  # truncated, perhaps within the exit code
        runs[cells[0]] = runs.get(cells[0], -1) + 1
        if (progress := _row(cells, runs[cells[0]])) is not None:
            found[within(cells[0], cluster)] = progress
    return None if not found and answer.out.strip() else found


def _row(cells: list[str], restarts: int) -> Progress | None:
    """Return the progress in one line of sacct; None if the name of the state is unknown."""
    state, word = _state(cells[1]), cells[1]
    if state is None:
        return None
    full = len(cells) > 8
    started, ended = (epoch_s(text, TIME_FORMAT) for text in cells[3:5]) if full else (None, None)
    code, number = (int(part) for part in cells[2].split(":"))
    nodes = hosts(cells[7]) if full and state is JobState.NODE_FAIL else ()
    blamed = nodes if len(nodes) == 1 else ()
    exit_code, why = None, _ENDS.get(word, "")
    if state is JobState.COMPLETED:
        exit_code = code
    elif state is JobState.CANCELLED and not why:
        why = word.replace("CANCELLED by", "by user")
    elif state is JobState.NODE_FAIL:
        why = node_words(blamed)
    elif state is JobState.FAILED and (code, number) == NOT_STARTED:
        why = UNREACHABLE
    elif state is JobState.FAILED and not why:
        exit_code = code or (128 + number if number else None)
        unknown = "Slurm reports it as failed, without an exit code"
        why = exit_words(exit_code) if exit_code else unknown
    elif not state.ended:
        why = _why_so_far(word, cells[8] if full else "")
    return Progress(state, exit_code, why, started, ended, bad_nodes=blamed, restarts=restarts)


def _is_row(cells: list[str]) -> bool:
    return len(cells) > 1 and _ID.fullmatch(cells[0].strip()) is not None


def _state(text: str) -> JobState | None:
    """Return the state for words such as ``CANCELLED by 1000``."""
    words = text.split()
    return STATES.get(words[0].rstrip("+")) if words else None


def _why_so_far(word: str, reason: str) -> str:
    """Return why a job that has not ended waits or is paused."""
    return _explained(reason) or _PAUSED.get(word.strip(), "")


def _explained(reason: str) -> str:
    """Return an explanation of a reason, followed by Slurm's name of it."""
    reason = reason.strip()
    if reason in ("", "None"):
        return ""
    name, _, nodes = reason.partition("UnavailableNodes:")
    if name.startswith("ReqNodeNotAvail"):
        return f"waits for nodes that are not available: {nodes or 'Slurm names none'} ({reason})"
    return f"{_REASONS[reason]} ({reason})" if reason in _REASONS else reason


def hosts(text: str) -> tuple[str, ...]:
    """Return the node names in a list such as ``nid[0001-0003,0007],login1``."""
    pieces = re.findall(r"[^\[\],\s]+(?:\[[^\]]*\][^\[\],\s]*)*", text)
    if "assigned" in text or "(" in text:
        return ()
    return tuple(name for piece in pieces for name in _expanded(piece))


def _expanded(piece: str) -> Iterable[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", piece)
    if match is None:
        return (piece,)
    head, ranges, tail = match.groups()
    return [
        f"{head}{number}{rest}"
        for part in ranges.split(",")
        for number in _numbers(part)
        for rest in _expanded(tail)
    ]


def _numbers(part: str) -> list[str]:
    """Return the numbers of ``0001-0003``, each with as many digits as the first."""
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", part)
    if match is None or int(match[2]) - int(match[1]) > 100_000:
        return [part]
    return [f"{n:0{len(match[1])}}" for n in range(int(match[1]), int(match[2]) + 1)]


# Variables that select sbatch's clusters; they take precedence over the script.
_VARIABLES = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
_DIRECTIVE = re.compile(r"#SBATCH\s+(?:--clusters?(?:=|\s+)|-M\s*)(\S+)")


def number_of(key: str) -> str:
    """Return the number in an id such as ``8653762;gpu``."""
    return key.partition(";")[0]


def cluster_of(key: str) -> str:
    """Return the cluster in an id; "" is the default cluster."""
    return key.partition(";")[2]


def cluster_name(cluster: str) -> str:
    """Return a cluster's name for messages; "" is the default cluster."""
    return f"cluster {cluster}" if cluster else "the default cluster"


def within(number: str, cluster: str) -> str:
    """Return the id of a job, or of a task of an array, in a cluster."""
    return f"{number};{cluster}" if cluster else number


def option(cluster: str) -> list[str]:
    """Return the option that restricts a command of Slurm to a cluster; none for the default."""
    return [f"--clusters={cluster}"] if cluster else []


def with_choice(request: JobRequest, environ: Mapping[str, str]) -> JobRequest:
    """Return the request with a directive for the clusters that variables select.

    The variables may have other values when the job is resubmitted.
    """
    named = next((value for name in _VARIABLES if (value := environ.get(name))), "")
    if not named or named == _directed(request.extra):
        return request
    return dataclasses.replace(request, extra=(*request.extra, f"#SBATCH --clusters={named}"))


def candidates(job: Job) -> str:
    """Return the cluster of a job, or all in which it may run, separated by commas."""
    if cluster := cluster_of(job.progress.scheduler_id or ""):
        return cluster
    try:
        script = job.script_path.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        script = []
    return _directed([*script, *job.request.extra])


def _directed(lines: Iterable[str]) -> str:
    """Return the clusters of the last directive that names some, which sbatch uses."""
    found = [match[1] for line in lines if (match := _DIRECTIVE.match(line))]
    return found[-1] if found else ""
