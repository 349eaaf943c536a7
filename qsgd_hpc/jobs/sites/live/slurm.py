"""Slurm: scontrol show partition, sinfo, sacctmgr show qos."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from qsgd_hpc.jobs.sites.live import Live, LiveQueue, answer_of, number_of, together, tried

__all__ = ["look", "parse_gpus", "parse_partitions", "parse_qos", "slurm_minutes"]

PARTITIONS = ("scontrol", "show", "partition", "--oneliner")
# One line for each kind of nodes in a partition.
KINDS = ("sinfo", "--noheader", "--format=%P|%a|%l|%D|%F|%G")
QOS = (
    "sacctmgr", "--noheader", "--parsable2", "show", "qos",
    "format=name,maxwall,maxtresperjob,mintresperjob",
)  # fmt: skip


def look() -> Live:
    """Query Slurm; if only sinfo or sacctmgr fails, its values stay unknown."""
    found, default, nodes = parse_partitions(answer_of(PARTITIONS))
    unanswered: list[str] = []
    gpus = tried(lambda: parse_gpus(answer_of(KINDS)), {}, unanswered)
    qos = tried(lambda: parse_qos(answer_of(QOS)), {}, unanswered)
    queues = {name: replace(q, gpus=gpus.get(name, ())) for name, q in found.items()}
    return Live(
        "slurm",
        queues,
        qos,
        nodes=nodes,
        cpus=together(n for q in queues.values() for n in q.cpus),
        gpus=together(n for q in queues.values() for n in q.gpus),
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
        total, cpus = number_of(facts.get("TotalNodes")), number_of(facts.get("TotalCPUs"))
        most = number_of(facts.get("MaxNodes"))
        queues[name] = LiveQueue(
            name,
            nodes=(max(1, number_of(facts.get("MinNodes")) or 1), total if most is None else most),
            walltime_min=(None, slurm_minutes(facts.get("MaxTime", ""))),
            is_open=_is_open(facts),
            total_nodes=total,
            # If nodes of a partition differ, the mean is not the number of any of them.
            cpus=(cpus // total,) if total and cpus and cpus % total == 0 else (),
        )
    totals = {q.total_nodes for q in queues.values()}
    # Partitions overlap, so their sum is too large; the number is certain if all have equal lists.
    return queues, default, totals.pop() if len(node_lists) == 1 == len(totals) else None


def _is_open(facts: Mapping[str, str]) -> bool:
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
    return {name: together(numbers) for name, numbers in found.items()}


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
