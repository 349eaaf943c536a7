"""A scheduler's answers about its machine: queues, nodes, limits.

PBS answers qstat -Q, qstat -B and pbsnodes -a in JSON (OpenPBS and PBS Pro); Slurm answers scontrol
show partition, sinfo and sacctmgr show qos. Values that a scheduler does not report are None or
empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs.schedulers.common import ask

__all__ = [
    "ASKED",
    "Live",
    "LiveQueue",
    "look",
    "parse_gpus",
    "parse_nodes",
    "parse_partitions",
    "parse_qos",
    "parse_queues",
    "parse_server",
    "slurm_minutes",
]

T = TypeVar("T")

# The schedulers that can be queried, and a command of each that exists where it is installed.
ASKED = {"pbs": "qstat", "slurm": "scontrol"}


@dataclass(frozen=True)
class LiveQueue:
    """One queue, partition or QOS.

    Attributes:
        nodes: least and most nodes of a job; None if there is no such limit.
        walltime_min: least and most walltime in minutes; None if there is no such limit.
        routes: queues to which it routes its jobs.
        route_only: whether it accepts jobs from other queues only.
        is_open: whether every user may submit to it now.
        total_nodes: its number of nodes.
        cpus: numbers of CPUs per node that occur, each once.
        gpus: numbers of GPUs per node that occur, each once.
    """

    name: str
    nodes: tuple[int | None, int | None] = (None, None)
    walltime_min: tuple[float | None, float | None] = (None, None)
    routes: tuple[str, ...] = ()
    route_only: bool = False
    is_open: bool = True
    total_nodes: int | None = None
    cpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Live:
    """One machine. ``unanswered``: a sentence for each query without an answer."""

    scheduler: str
    queues: Mapping[str, LiveQueue] = field(default_factory=dict)
    qos: Mapping[str, LiveQueue] = field(default_factory=dict)
    nodes: int | None = None
    cpus: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    filesystems: tuple[str, ...] = ()
    default_queue: str | None = None
    unanswered: tuple[str, ...] = ()


def look(scheduler: str) -> Live:
    """Query a scheduler of :data:`ASKED` about its machine.

    Raises:
        LaunchError: it does not answer, or its answer cannot be parsed.
    """
    return {"pbs": _look_pbs, "slurm": _look_slurm}[scheduler]()


def _together(numbers: Iterable[int | None]) -> tuple[int, ...]:
    """Return the known numbers, each once, in ascending order."""
    return tuple(sorted({number for number in numbers if number is not None}))


def _number_of(value: object) -> int | None:
    """Return an integer that is written as such; all other words, such as UNLIMITED, are None."""
    text = str(value)
    return int(text) if text.isdigit() else None


def _answer_of(argv: Sequence[str]) -> str:
    """Return the output of a command.

    Raises:
        LaunchError: the command failed; the message has its error.
    """
    answer = ask(argv)
    if answer.code != 0:
        raise LaunchError(f"`{' '.join(argv)}` gave no answer: {answer.said}")
    return answer.out


def _tried(query: Callable[[], T], otherwise: T, unanswered: list[str]) -> T:
    """Return the result of a query; if it has no answer, another value, and record the error."""
    try:
        return query()
    except LaunchError as error:
        unanswered.append(str(error))
        return otherwise


_PBS_QUEUES = ("qstat", "-Q", "-f", "-F", "json")
_PBS_SERVER = ("qstat", "-B", "-f", "-F", "json")
_PBS_NODES = ("pbsnodes", "-a", "-F", "json")


def _look_pbs() -> Live:
    """Query PBS; if only its queries on server or nodes fail, their values stay unknown."""
    queues = parse_queues(_pbs_json(_PBS_QUEUES))
    unanswered: list[str] = []
    filesystems, default = _tried(
        lambda: parse_server(_pbs_json(_PBS_SERVER)), ((), None), unanswered
    )
    nodes, cpus, gpus = _tried(
        lambda: parse_nodes(_pbs_json(_PBS_NODES)), (None, (), ()), unanswered
    )
    return Live(
        "pbs",
        queues,
        nodes=nodes,
        cpus=cpus,
        gpus=gpus,
        filesystems=filesystems,
        default_queue=default,
        unanswered=tuple(unanswered),
    )


def _pbs_json(argv: Sequence[str]) -> Mapping[str, Any]:
    text = _answer_of(argv)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise LaunchError(
            f"`{' '.join(argv)}` does not answer in JSON ({error}): OpenPBS and PBS Pro do since "
            "version 18. Write the profile by hand; see jobs/README.md."
        ) from None
    return found if isinstance(found, dict) else {}


def parse_queues(answer: Mapping[str, Any]) -> dict[str, LiveQueue]:
    """Return the queues by name."""
    return {name: _pbs_queue(name, facts) for name, facts in answer.get("Queue", {}).items()}


def _pbs_queue(name: str, facts: Mapping[str, Any]) -> LiveQueue:
    least, most = facts.get("resources_min", {}), facts.get("resources_max", {})
    restricted = any(facts.get(f"acl_{who}_enable") == "True" for who in ("user", "group", "host"))
    runs = facts.get("enabled") == "True" and facts.get("started") == "True"
    return LiveQueue(
        name,
        nodes=(_number_of(least.get("nodect")), _number_of(most.get("nodect"))),
        walltime_min=(_pbs_minutes(least.get("walltime")), _pbs_minutes(most.get("walltime"))),
        routes=_pbs_words(facts.get("route_destinations")),
        route_only=facts.get("from_route_only") == "True",
        is_open=runs and not restricted,
    )


def parse_server(answer: Mapping[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """Return the file systems that jobs can request, and the default queue."""
    for facts in answer.get("Server", {}).values():
        resources = facts.get("resources_available", {})
        return _pbs_words(resources.get("valid_filesystems")), facts.get("default_queue")
    return (), None


def parse_nodes(answer: Mapping[str, Any]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the number of hosts, and their numbers of CPUs and of GPUs, each once.

    A host may consist of several vnodes, whose CPUs and GPUs are added.
    """
    cpus: dict[str, int] = {}
    gpus: dict[str, int] = {}
    for name, facts in answer.get("nodes", {}).items():
        resources = facts.get("resources_available", {})
        host = str(resources.get("host", name))
        cpus[host] = cpus.get(host, 0) + (_number_of(resources.get("ncpus")) or 0)
        gpus[host] = gpus.get(host, 0) + (_number_of(resources.get("ngpus")) or 0)
    return len(cpus), _together(n or None for n in cpus.values()), _together(gpus.values())


def _pbs_words(value: object) -> tuple[str, ...]:
    return tuple(re.findall(r"[^\s,:]+", value)) if isinstance(value, str) else ()


def _pbs_minutes(value: object) -> float | None:
    """Return the minutes of ``01:00:00`` or of a number of seconds; else None."""
    if (seconds := _number_of(value)) is not None:
        return seconds / 60
    match = re.fullmatch(r"(\d+):(\d+):(\d+)", str(value))
    return int(match[1]) * 60 + int(match[2]) + int(match[3]) / 60 if match else None


_PARTITIONS = ("scontrol", "show", "partition", "--oneliner")
# One line for each kind of nodes in a partition.
_KINDS = ("sinfo", "--noheader", "--format=%P|%a|%l|%D|%F|%G")
_QOS = (
    "sacctmgr", "--noheader", "--parsable2", "show", "qos",
    "format=name,maxwall,maxtresperjob,mintresperjob",
)  # fmt: skip


def _look_slurm() -> Live:
    """Query Slurm; if only sinfo or sacctmgr fails, its values stay unknown."""
    found, default, nodes = parse_partitions(_answer_of(_PARTITIONS))
    unanswered: list[str] = []
    gpus = _tried(lambda: parse_gpus(_answer_of(_KINDS)), {}, unanswered)
    qos = _tried(lambda: parse_qos(_answer_of(_QOS)), {}, unanswered)
    queues = {name: replace(q, gpus=gpus.get(name, ())) for name, q in found.items()}
    return Live(
        "slurm",
        queues,
        qos,
        nodes=nodes,
        cpus=_together(n for q in queues.values() for n in q.cpus),
        gpus=_together(n for q in queues.values() for n in q.gpus),
        default_queue=default,
        unanswered=tuple(unanswered),
    )


def parse_partitions(text: str) -> tuple[dict[str, LiveQueue], str | None, int | None]:
    """Return partitions by name, the default one, and the number of nodes if it is certain."""
    queues: dict[str, LiveQueue] = {}
    default, node_lists = None, set()
    for line in text.splitlines():
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        name = facts.get("PartitionName")
        if name is None:
            continue
        if facts.get("Default") == "YES":
            default = name
        node_lists.add(facts.get("Nodes"))
        total, cpus = _number_of(facts.get("TotalNodes")), _number_of(facts.get("TotalCPUs"))
        most = _number_of(facts.get("MaxNodes"))
        queues[name] = LiveQueue(
            name,
            nodes=(max(1, _number_of(facts.get("MinNodes")) or 1), total if most is None else most),
            walltime_min=(None, slurm_minutes(facts.get("MaxTime", ""))),
            is_open=_is_open_partition(facts),
            total_nodes=total,
            # If nodes of a partition differ, the mean is not the number of any of them.
            cpus=(cpus // total,) if total and cpus and cpus % total == 0 else (),
        )
    totals = {q.total_nodes for q in queues.values()}
    # Partitions overlap, so their sum is too large; the number is certain if all have equal lists.
    return queues, default, totals.pop() if len(node_lists) == 1 == len(totals) else None


def _is_open_partition(facts: Mapping[str, str]) -> bool:
    everyone = all(facts.get(key, "ALL") == "ALL" for key in ("AllowGroups", "AllowAccounts"))
    return everyone and facts.get("State", "UP") == "UP" and facts.get("Hidden", "NO") == "NO"


def parse_gpus(text: str) -> dict[str, tuple[int, ...]]:
    """Return the numbers of GPUs per node of each partition, from ``gpu:a100:4(S:0-1)``."""
    found: dict[str, set[int]] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) < 6:
            continue
        counts = re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", fields[5])
        found.setdefault(fields[0].strip().rstrip("*"), set()).add(sum(map(int, counts)))
    return {name: _together(numbers) for name, numbers in found.items()}


def parse_qos(text: str) -> dict[str, LiveQueue]:
    """Return the QOS by name; limits that a QOS does not set are None."""
    found = {}
    for line in text.splitlines():
        name, *rest = line.split("|")
        if not name or len(rest) < 3:
            continue
        longest, most, least = rest[:3]
        found[name] = LiveQueue(
            name,
            nodes=(_tres_nodes(least), _tres_nodes(most)),
            walltime_min=(None, slurm_minutes(longest)),
        )
    return found


def _tres_nodes(text: str) -> int | None:
    match = re.search(r"(?:^|,)node=(\d+)", text)
    return int(match[1]) if match else None


def slurm_minutes(text: str) -> float | None:
    """Return minutes from ``2-00:00:00``, ``2-12``, ``00:30:00``, ``5:00`` or ``30``; else None."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        return None
    days = match[1]
    parts = [int(part) for part in match.groups()[1:] if part is not None]
    if days is not None or len(parts) == 3:
        hours, mins, seconds = (*parts, 0, 0)[:3]
    else:
        hours, mins, seconds = 0, *(*parts, 0)[:2]
    return int(days or 0) * 1440 + hours * 60 + mins + seconds / 60
