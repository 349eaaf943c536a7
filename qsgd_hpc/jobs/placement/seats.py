"""Placement of the ranks of a node: the model, and the placement that a profile plans. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qsgd_hpc.jobs.model import JobRequest
from qsgd_hpc.jobs.script.render import cores_per_rank
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.launch.place import cpus_of

__all__ = ["Domain", "Node", "Seat", "Threads", "domains_of", "expected"]


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

    def around(self, cpus: frozenset[int]) -> tuple[Domain, ...]:
        """Return the domains of these hardware threads."""
        return tuple(domain for domain in self.domains if domain.cpus & cpus)


def domains_of(site: Site) -> tuple[Domain, ...]:
    """Return the NUMA domains of a profile; the whole node if it defines none."""
    if site.numa:
        return tuple(
            Domain(number, cpus_of(numa.cpus), numa.gpus, numa.nics)
            for number, numa in enumerate(site.numa)
        )
    count = site.hwthreads or site.cores or 0
    gpus = site.gpu.order if site.gpu else ()
    return (Domain(None, frozenset(range(count)), tuple(sorted(gpus))),) if count or gpus else ()


def expected(site: Site, request: JobRequest) -> Node:
    """Return a node of the job as planned by the profile; all of its nodes are equal.

    Args:
        site: the profile. Cores are known if it lists them, or if its launcher binds blocks
            of them: {depth} or {cpus_per_rank} in ``launcher.argv``.
        request: filled by :func:`validate.fill`.
    """
    domains = domains_of(site)
    threads = _threads(site, domains)
    taken = {**site.env, **request.env}
    seats = []
    for local_rank in range(request.ranks_per_node or 1):
        seats.append(
            Seat(
                rank=local_rank,
                local_rank=local_rank,
                cpus=_cpus(site, request, local_rank, threads),
                gpu=_turn(_gpus(site, request), local_rank),
                nic=_nic(site, request, local_rank),
                omp_threads=int(text) if (text := taken.get("OMP_NUM_THREADS", "")).isdigit()
                else None,
            )
        )  # fmt: skip
    return Node(site.name, tuple(seats), domains, threads)


def _turn(values: tuple[str, ...], local_rank: int) -> str | None:
    return values[local_rank % len(values)] if values else None


def _gpus(site: Site, request: JobRequest) -> tuple[str, ...]:
    """Return the order of GPUs; the user's, if --env sets it."""
    if site.gpu is None:
        return ()
    given = request.env.get(site.gpu.variable)
    return site.gpu.order if given is None else tuple(filter(None, given.split(",")))


def _nic(site: Site, request: JobRequest, local_rank: int) -> str | None:
    if site.nic is None:
        return None
    return request.env.get(site.nic.variable) or _turn(site.nic.order, local_rank)


def _threads(site: Site, domains: tuple[Domain, ...]) -> Threads:
    count = len(frozenset().union(*(domain.cpus for domain in domains)))
    per_core = (site.hwthreads or site.cores or 1) // (site.cores or 1) or 1
    return Threads(per_core, max(1, count // per_core)) if per_core > 1 else Threads()


def _cpus(site: Site, request: JobRequest, local_rank: int, threads: Threads) -> frozenset[int]:
    listed = _turn(site.cpu.lists, local_rank)
    if listed is not None:
        return cpus_of(listed)
    words = "".join(site.launcher_argv)
    if site.cores is None or not ("{depth}" in words or "{cpus_per_rank}" in words):
        return frozenset()
    depth = cores_per_rank(request, site)
    block = range(local_rank * depth, (local_rank + 1) * depth)
    return frozenset(cpu + k * threads.stride for cpu in block for k in range(threads.per_core))
