"""Parse the ranks' placement reports (see launch/place.py) from a job's log. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from qsgd_hpc.jobs.placement.seats import Domain, Node, Seat, Threads, domains_of
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.launch.place import GPU_VARIABLES, MARK, cpus_of

__all__ = ["parse_places"]

Record = Mapping[str, Any]


def parse_places(text: str, site: Site) -> list[Node]:
    """Return the nodes of a job, by their first ranks.

    Labels of launchers and other output, also on the same line, are ignored, as is a report that
    other output interrupts.

    Args:
        text: the job's log.
        site: the profile, for variables, and for the positions of GPUs that no tool reports.
    """
    hosts: dict[str, list[Record]] = {}
    for record in _records(text):
        hosts.setdefault(record["host"], []).append(record)
    nodes = [_node(host, records, site) for host, records in hosts.items()]
    return sorted(nodes, key=lambda node: node.seats[0].rank)


def _records(text: str) -> Iterable[Record]:
    decoder = json.JSONDecoder()
    for found in re.finditer(re.escape(MARK), text):
        try:
            record, _ = decoder.raw_decode(text, found.end())
            complete = isinstance(record["host"], str) and cpus_of(record["cpus"])
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if complete:
            yield record


def _node(host: str, records: list[Record], site: Site) -> Node:
    first = records[0]
    buses = _buses(records)
    labels = {bus: str(number) for number, bus in enumerate(buses)}
    records.sort(key=lambda record: (record["local_rank"] or 0, record["rank"] or 0))
    seats = tuple(_seat(record, labels, site) for record in records)
    domains = _domains(first, records, labels, site)
    return Node(host, seats, domains, _threads(first["siblings"]))


def _buses(records: list[Record]) -> list[str]:
    """Return the buses of all the node's GPUs in the order of their numbers.

    If each rank sees its own devices only, they are numbered in the order of the buses.
    """
    lists = [[gpu["bus"] for gpu in record["gpus"]] for record in records]
    every = {bus for buses in lists for bus in buses}
    return next((buses for buses in lists if set(buses) == every), sorted(every))


def _seat(record: Record, labels: Mapping[str, str], site: Site) -> Seat:
    variables = record["variables"]
    threads = variables.get("OMP_NUM_THREADS", "").partition(",")[0]
    return Seat(
        rank=record["rank"] or 0,
        local_rank=record["local_rank"] or 0,
        cpus=cpus_of(record["cpus"]),
        gpu=_gpu(record, labels, site),
        nic=variables.get(site.nic.variable) if site.nic else None,
        omp_threads=int(threads) if threads.isdigit() else None,
        torchrun=_torchrun(variables),
    )


def _torchrun(variables: Mapping[str, str]) -> tuple[str, ...]:
    if "RANK" not in variables:
        return ()
    numbers = (variables.get(name, "?") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    at = (variables.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return (*numbers, ":".join(at))


def _gpu(record: Record, labels: Mapping[str, str], site: Site) -> str | None:
    """Return the GPU that ``local_rank`` selects among those that the rank sees."""
    gpus, variables = record["gpus"], record["variables"]
    names = (*([site.gpu.variable] if site.gpu else []), *GPU_VARIABLES)
    given = next((variables[name] for name in names if name in variables), None)
    if given is not None:
        seen = given.split(",")
    elif site.gpu and site.gpu.tiles > 1:  # the detected devices are cards
        seen = list(site.gpu.order)
    else:
        seen = [str(n) for n in range(len(gpus))]
    own = seen[(record["local_rank"] or 0) % len(seen)].strip() if seen else ""
    number, dot, tile = own.partition(".")
    for index, gpu in enumerate(gpus):
        if number == str(index) or (len(own) > 4 and (gpu["uuid"] or "").startswith(own)):
            return f"{labels[gpu['bus']]}{dot}{tile}" if number.isdigit() else labels[gpu["bus"]]
    return None if own in ("", "-1", "NoDevFiles") else own


def _domains(
    first: Record, records: list[Record], labels: Mapping[str, str], site: Site
) -> tuple[Domain, ...]:
    """Return the detected domains; the profile adds positions of GPUs and cards if unknown."""
    planned = domains_of(site)
    known = planned if site.numa else ()
    homes = {gpu["bus"]: gpu["numa"] for record in records for gpu in record["gpus"]}
    placed = any(home is not None for home in homes.values())
    cards = {name: home for name, home in first["nics"].items() if home is not None}
    result = []
    for text_number, text in first["domains"].items():
        number, cpus = int(text_number), cpus_of(text)
        near = next((domain for domain in known if domain.cpus & cpus), Domain(number, cpus))
        gpus = tuple(labels[bus] for bus in labels if homes[bus] == number)
        nics = tuple(name for name, home in cards.items() if home == number)
        result.append(
            Domain(number, cpus, gpus if placed else near.gpus, nics if cards else near.nics)
        )
    return tuple(result) or planned


def _threads(siblings: str | None) -> Threads:
    cpus = sorted(cpus_of(siblings or "0"))
    return Threads(len(cpus), cpus[1] - cpus[0]) if len(cpus) > 1 else Threads()
