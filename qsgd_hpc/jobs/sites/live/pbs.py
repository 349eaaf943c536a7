"""OpenPBS and PBS Pro: qstat -Q, qstat -B, pbsnodes -a, each as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qsgd_hpc.errors import LaunchError
from qsgd_hpc.jobs.sites.live import Live, LiveQueue, answer_of, number_of, together, tried

__all__ = ["look", "parse_nodes", "parse_queues", "parse_server"]

QUEUES = ("qstat", "-Q", "-f", "-F", "json")
SERVER = ("qstat", "-B", "-f", "-F", "json")
NODES = ("pbsnodes", "-a", "-F", "json")


def look() -> Live:
    """Query PBS; if only its queries on server or nodes fail, their values stay unknown."""
    queues = parse_queues(_json(QUEUES))
    unanswered: list[str] = []
    filesystems, default = tried(lambda: parse_server(_json(SERVER)), ((), None), unanswered)
    nodes, cpus, gpus = tried(lambda: parse_nodes(_json(NODES)), (None, (), ()), unanswered)
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


def _json(argv: Sequence[str]) -> Mapping[str, Any]:
    text = answer_of(argv)
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
    return {name: _queue(name, facts) for name, facts in answer.get("Queue", {}).items()}


def _queue(name: str, facts: Mapping[str, Any]) -> LiveQueue:
    least, most = facts.get("resources_min", {}), facts.get("resources_max", {})
    restricted = any(facts.get(f"acl_{who}_enable") == "True" for who in ("user", "group", "host"))
    runs = facts.get("enabled") == "True" and facts.get("started") == "True"
    return LiveQueue(
        name,
        nodes=(number_of(least.get("nodect")), number_of(most.get("nodect"))),
        walltime_min=(_minutes(least.get("walltime")), _minutes(most.get("walltime"))),
        routes=_words(facts.get("route_destinations")),
        route_only=facts.get("from_route_only") == "True",
        is_open=runs and not restricted,
    )


def parse_server(answer: Mapping[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """Return the file systems that jobs can request, and the default queue."""
    for facts in answer.get("Server", {}).values():
        resources = facts.get("resources_available", {})
        return _words(resources.get("valid_filesystems")), facts.get("default_queue")
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
        cpus[host] = cpus.get(host, 0) + (number_of(resources.get("ncpus")) or 0)
        gpus[host] = gpus.get(host, 0) + (number_of(resources.get("ngpus")) or 0)
    return len(cpus), together(n or None for n in cpus.values()), together(gpus.values())


def _words(value: object) -> tuple[str, ...]:
    return tuple(re.findall(r"[^\s,:]+", value)) if isinstance(value, str) else ()


def _minutes(value: object) -> float | None:
    """Return the minutes of ``01:00:00`` or of a number of seconds; else None."""
    if (seconds := number_of(value)) is not None:
        return seconds / 60
    match = re.fullmatch(r"(\d+):(\d+):(\d+)", str(value))
    return int(match[1]) * 60 + int(match[2]) + int(match[3]) / 60 if match else None
