"""Placement of the ranks of a node: the model, the profile's plan, and the ranks' reports. Pure.

The reports (see launch/place.py) are in a job's log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.script import by_rank, cores_per_rank
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.launch.place import GPU_VARIABLES, MARK, cpus_of

__all__ = ["Domain", "Node", "Seat", "Threads", "expected", "parse_places"]

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Seat:
    """Placement of one rank; empty values and None are unknown.

    Attributes:
        cpus: the hardware threads on which it may run.
        gpu: the GPU, or tile as ``"0.1"``, that ``local_rank`` selects for it.
        nic: the value of the card's variable.
        torchrun: RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR:MASTER_PORT; () if these are not
            set.
    """

    rank: int
    local_rank: int
    cpus: frozenset[int] = frozenset()
    gpu: str | None = None
    nic: str | None = None
    omp_threads: int | None = None
    torchrun: tuple[str, ...] = ()


@dataclass(frozen=True)
class Domain:
    """One NUMA domain: its hardware threads, GPUs and network cards.

    ``number`` is None for a whole node whose domains are unknown.
    """

    number: int | None
    cpus: frozenset[int]
    gpus: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Threads:
    """Numbering of hardware threads: threads t and t + stride belong to one core."""

    per_core: int = 1
    stride: int = 1

    def core(self, cpu: int) -> int:
        """Return the core of a hardware thread."""
        return cpu // self.per_core if self.stride == 1 else cpu % self.stride


@dataclass(frozen=True)
class Node:
    """One node: its ranks in the order of their local ranks, and its NUMA domains."""

    host: str
    seats: tuple[Seat, ...]
    domains: tuple[Domain, ...] = ()
    threads: Threads = Threads()

    def cores(self, cpus: Iterable[int]) -> frozenset[int]:
        """Return the cores of hardware threads."""
        return frozenset(map(self.threads.core, cpus))

    def home(self, gpu: str | None) -> Domain | None:
        """Return the domain of a GPU (or of a tile's GPU); None: unknown."""
        names = {gpu, gpu.partition(".")[0]} if gpu is not None else set()
        found = (domain for domain in self.domains if names & set(domain.gpus))
        return next((domain for domain in found if domain.number is not None), None)

    def is_far(self, seat: Seat) -> bool:
        """Return whether a rank has no core in the domain of its GPU; False if unknown."""
        home = self.home(seat.gpu)
        return home is not None and bool(seat.cpus) and not home.cpus & seat.cpus

    def is_crowded(self, seat: Seat) -> bool:
        """Return whether a rank has more OpenMP threads than cores; False if unknown."""
        return bool(seat.cpus) and (seat.omp_threads or 0) > len(self.cores(seat.cpus))

    @property
    def is_unbound(self) -> bool:
        """Whether several ranks may all run on the same cores."""
        return len(self.seats) > 1 and len({seat.cpus for seat in self.seats}) == 1

    def around(self, cpus: frozenset[int]) -> tuple[Domain, ...]:
        """Return the domains of these hardware threads."""
        return tuple(domain for domain in self.domains if domain.cpus & cpus)


def _domains_of(site: Site) -> tuple[Domain, ...]:
    """Return the NUMA domains of a profile; the whole node if it defines none."""
    if site.numa:
        return tuple(
            Domain(number, cpus_of(numa.cpus), numa.gpus, numa.nics)
            for number, numa in enumerate(site.numa)
        )
    count = site.hwthreads or site.cores or 0
    order = site.gpu.order if site.gpu else ()
    gpus = tuple(sorted(order, key=lambda gpu: (len(gpu), gpu)))
    return (Domain(None, frozenset(range(count)), gpus),) if count or gpus else ()


def expected(site: Site, request: JobRequest) -> Node:
    """Return a node of the job as planned by the profile; all of its nodes are equal.

    Args:
        site: the profile. Cores are known if it lists them, or if its launcher binds blocks
            of them: {depth} or {cpus_per_rank} in ``launcher.argv``.
        request: filled by :func:`validate.fill`.
    """
    domains = _domains_of(site)
    threads = _threads(site, domains)
    omp_threads = {**site.env, **request.env}.get("OMP_NUM_THREADS", "")
    seats = tuple(
        Seat(
            rank=local_rank,
            local_rank=local_rank,
            cpus=_cpus(site, request, local_rank, threads),
            gpu=_value(_gpus(site, request), request, local_rank),
            nic=_nic(site, request, local_rank),
            omp_threads=int(omp_threads) if omp_threads.isdigit() else None,
        )
        for local_rank in range(request.ranks_per_node or 1)
    )
    return Node(site.name, seats, domains, threads)


def _value(values: tuple[str, ...], request: JobRequest, local_rank: int) -> str | None:
    return by_rank(values, request.ranks_per_node or 1)[local_rank] if values else None


def _gpus(site: Site, request: JobRequest) -> tuple[str, ...]:
    """Return the order of GPUs; the user's, if --env sets it."""
    if site.gpu is None:
        return ()
    given = request.env.get(site.gpu.variable)
    return site.gpu.order if given is None else tuple(filter(None, given.split(",")))


def _nic(site: Site, request: JobRequest, local_rank: int) -> str | None:
    if site.nic is None:
        return None
    return request.env.get(site.nic.variable) or _value(site.nic.order, request, local_rank)


def _threads(site: Site, domains: tuple[Domain, ...]) -> Threads:
    count = len(frozenset().union(*(domain.cpus for domain in domains)))
    per_core = site.threads_per_core
    return Threads(per_core, max(1, count // per_core)) if per_core > 1 else Threads()


def _cpus(site: Site, request: JobRequest, local_rank: int, threads: Threads) -> frozenset[int]:
    listed, ranks = site.cpu.lists, request.ranks_per_node or 1
    if listed and (ranks <= len(listed) or site.cpu.bound_by == "wrapper"):
        return cpus_of(by_rank(listed, ranks)[local_rank])
    words = "".join(site.launcher_argv)
    if site.cores is None or not ("{depth}" in words or "{cpus_per_rank}" in words):
        return frozenset()
    depth = cores_per_rank(request, site)
    block = range(local_rank * depth, (local_rank + 1) * depth)
    return frozenset(cpu + k * threads.stride for cpu in block for k in range(threads.per_core))


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
    nodes = [_reported_node(host, records, site) for host, records in hosts.items()]
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


def _reported_node(host: str, records: list[Record], site: Site) -> Node:
    first = records[0]
    buses = _buses(records)
    labels = {bus: str(number) for number, bus in enumerate(buses)}
    records.sort(key=lambda record: (record["local_rank"] or 0, record["rank"] or 0))
    seats = tuple(_reported_seat(record, labels, site) for record in records)
    domains = _reported_domains(first, records, labels, site)
    return Node(host, seats, domains, _reported_threads(first["siblings"]))


def _buses(records: list[Record]) -> list[str]:
    """Return the buses of all the node's GPUs in the order of their numbers.

    If each rank sees its own devices only, they are numbered in the order of the buses.
    """
    lists = [[gpu["bus"] for gpu in record["gpus"]] for record in records]
    every = {bus for buses in lists for bus in buses}
    return next((buses for buses in lists if set(buses) == every), sorted(every))


def _reported_seat(record: Record, labels: Mapping[str, str], site: Site) -> Seat:
    variables = record["variables"]
    threads = variables.get("OMP_NUM_THREADS", "").partition(",")[0]
    return Seat(
        rank=record["rank"] or 0,
        local_rank=record["local_rank"] or 0,
        cpus=cpus_of(record["cpus"]),
        gpu=_reported_gpu(record, labels, site),
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


def _reported_gpu(record: Record, labels: Mapping[str, str], site: Site) -> str | None:
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


def _reported_domains(
    first: Record, records: list[Record], labels: Mapping[str, str], site: Site
) -> tuple[Domain, ...]:
    """Return the detected domains; the profile adds positions of GPUs and cards if unknown."""
    planned = _domains_of(site)
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


def _reported_threads(siblings: str | None) -> Threads:
    cpus = sorted(cpus_of(siblings or "0"))
    return Threads(len(cpus), cpus[1] - cpus[0]) if len(cpus) > 1 else Threads()
