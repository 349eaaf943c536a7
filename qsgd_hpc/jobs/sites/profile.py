"""A site profile as frozen data. All facts about a machine are here, none in the code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from qsgd_hpc.jobs.words import minutes
from qsgd_hpc.launch.cluster import parse as parse_network

__all__ = [
    "LIMITS",
    "Bin",
    "Cpu",
    "Dragonfly",
    "FatTree",
    "Gpu",
    "Library",
    "Network",
    "Nic",
    "Numa",
    "Queue",
    "Site",
    "build",
]

# Limits on numbers of jobs, and the text for each.
LIMITS = {
    "per_user": "{} per user",
    "queued_per_user": "{} queued per user",
    "eligible_per_user": "{} gaining priority per user",
    "running_per_user": "{} running per user",
    "per_project": "{} per project",
    "queued_per_project": "{} queued per project",
    "running_per_project": "{} running per project",
}


@dataclass(frozen=True)
class Bin:
    """The longest walltime of jobs with this range of nodes; both ends are included."""

    nodes: tuple[int, int]
    walltime_min: float


@dataclass(frozen=True)
class Queue:
    """Limits of one queue (partition, QOS); both ranges include their ends.

    ``limits``: numbers of jobs, by the keys of jobs/schema.json. ``gpus`` and ``cores``: those of a
    node of this queue, if different from the site's.
    """

    name: str
    nodes: tuple[int, int]
    walltime_min: tuple[float, float]
    routes: tuple[str, ...] = ()
    via: str | None = None
    auto: bool = True
    note: str = ""
    bins: tuple[Bin, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    unit: str = "node"
    gpus: int | None = None
    cores: int | None = None
    partition: str | None = None
    qos: str | None = None
    array_at_once: int | None = None
    chain: bool = True
    preemptible: bool = False

    def longest_min(self, nodes: int) -> float:
        """Return the longest walltime for a number of nodes, in minutes."""
        fitting = [b.walltime_min for b in self.bins if b.nodes[0] <= nodes <= b.nodes[1]]
        return min([self.walltime_min[1], *fitting])

    def takes(self, nodes: int, walltime_min: float | None) -> bool:
        """Return whether the ranges allow a job of this size; walltime None: any walltime."""
        if not self.nodes[0] <= nodes <= self.nodes[1]:
            return False
        return walltime_min is None or (
            self.walltime_min[0] <= walltime_min <= self.longest_min(nodes)
        )


@dataclass(frozen=True)
class Gpu:
    """The GPU of each local rank.

    ``order[local_rank]`` is the device (or tile, ``"0.1"``) of a rank. ``view`` is ``all`` if a
    rank sees all devices in this order, ``one`` if it sees its own only. ``bound_by`` is
    ``launcher`` if the launcher sets the variable in each rank; it must then not be changed.
    ``tiles`` is the number of tiles per card, each of which is a device.
    """

    variable: str
    order: tuple[str, ...]
    view: str = "all"
    bound_by: str = "wrapper"
    tiles: int = 1

    @property
    def natural(self) -> bool:
        """Whether the order is the machine's default, so that no variable is needed."""
        return self.order == tuple(map(str, range(len(self.order))))


@dataclass(frozen=True)
class Library:
    """Settings of a communication library for this machine, such as NCCL over Slingshot.

    ``path`` is put first on LD_LIBRARY_PATH. If ``use`` is false, the job unsets the variables:
    the site's modules may have set them.
    """

    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    use: bool = True


@dataclass(frozen=True)
class Cpu:
    """The cores of each local rank (``lists[local_rank]``), and whether the launcher binds them."""

    lists: tuple[str, ...] = ()
    bound_by: str = "launcher"


@dataclass(frozen=True)
class Nic:
    """The network card of each local rank, and the variable that libraries read it from."""

    variable: str
    order: tuple[str, ...]


@dataclass(frozen=True)
class Numa:
    """One NUMA domain of a node: its hardware threads, GPUs and cards."""

    cpus: str
    gpus: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dragonfly:
    """One group of a dragonfly: fully connected routers; groups are fully connected by global
    links.

    ``endpoints``: network cards per router; ``global_links``: all links that leave a group.
    """

    routers: int
    endpoints: int
    groups: int | None = None
    local_links: int = 1
    global_links: int | None = None


@dataclass(frozen=True)
class FatTree:
    """A leaf switch of a two-level tree: network cards below, links of the same speed above."""

    leaf_hosts: int
    leaf_uplinks: int


@dataclass(frozen=True)
class Network:
    """The network; rates in Gb/s per card, GB/s within a node, latencies in us; None: unknown.

    ``memory_gbs``: memory bandwidth of a node. ``gpu_gbs`` and ``host_gbs``: bandwidth of one GPU
    to its neighbours, and to the node's memory.
    """

    topology: str
    nics: int
    nic_gbps: float
    source: str
    across_us: float | None = None
    within_us: float | None = None
    dragonfly: Dragonfly | None = None
    fat_tree: FatTree | None = None
    memory_gbs: float | None = None
    gpu_link: str | None = None
    gpu_gbs: float | None = None
    host_gbs: float | None = None


@dataclass(frozen=True)
class Site:
    """One machine. The meaning of each field is in jobs/schema.json.

    ``remarks``: findings about this installation, for users who submit.
    """

    name: str
    description: str
    scheduler: str
    launcher_argv: tuple[str, ...]
    launcher_label: tuple[str, ...] = ()
    launcher_mpi: str = ""
    embedded_default: bool = False
    generic: bool = False
    retired: str | None = None
    nodes: int | None = None
    login_hosts: tuple[str, ...] = ()
    login_env: Mapping[str, str] = field(default_factory=dict)
    shell: str = "/bin/bash"
    python: str | None = None
    ranks_per_node: int | None = None
    cores: int | None = None
    hwthreads: int | None = None
    gpus: int = 0
    gpu: Gpu | None = None
    cpu: Cpu = Cpu()
    nic: Nic | None = None
    network: Network | None = None
    emulated_network: str | None = None
    numa: tuple[Numa, ...] = ()
    local_rank_variables: tuple[str, ...] = ()
    queue_kind: str = "queue"
    queues: Mapping[str, Queue] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    live_limits: str | None = None
    filesystems: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    default_account: str | None = None
    default_queue: str | None = None
    default_walltime_min: float | None = None
    default_filesystems: tuple[str, ...] = ()
    account_suffix: str = ""
    directives: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    libraries: tuple[Library, ...] = ()
    meeting_address: str | None = None
    proxy: str | None = None
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def partition_and_qos(self, queue: str) -> tuple[str | None, str | None]:
        """Return the partition and the QOS of --queue for Slurm; None if not given."""
        found = self.queues.get(queue)
        partition, qos = (found.partition, found.qos) if found else (None, None)
        if self.queue_kind == "qos":
            return partition, qos or queue
        return partition or queue, qos

    @property
    def threads_per_core(self) -> int:
        """Hardware threads of a core, at least 1; the same on all nodes of a site."""
        return (self.hwthreads or 1) // (self.cores or 1) or 1

    @property
    def libraries_in_use(self) -> tuple[Library, ...]:
        """The libraries whose variables, folders and directives a job gets."""
        return tuple(each for each in self.libraries if each.use)

    def without(self, names: Iterable[str]) -> Site:
        """Return the site with these libraries disabled."""
        out = set(names)
        kept = (replace(each, use=each.use and each.name not in out) for each in self.libraries)
        return replace(self, libraries=tuple(kept))

    def at(self, queue: str | None) -> Site:
        """Return the site with the values for the nodes of one queue."""
        found = self.queues.get(queue) if queue else None
        if found is None or (found.gpus is None and found.cores is None):
            return self
        gpus = self.gpus if found.gpus is None else found.gpus
        cores = self.cores if found.cores is None else found.cores
        return replace(
            self,
            gpus=gpus,
            gpu=self.gpu if gpus == self.gpus else None,
            cores=cores,
            hwthreads=cores * self.threads_per_core if cores and self.hwthreads else None,
        )


def build(name: str, data: Mapping[str, Any]) -> Site:
    """Convert checked profile data (see schema.py) to a :class:`Site`."""
    node, defaults = data.get("node", {}), data.get("defaults", {})
    gpu, nic, cpu, limits = (
        {key: value for key, value in data.get(part, {}).items() if key != "verify"}
        for part in ("gpu", "nic", "cpu", "limits")
    )
    if gpu:
        gpu["order"] = _strings(gpu["order"])
    return Site(
        name=name,
        launcher_argv=tuple(data["launcher"]["argv"]),
        launcher_label=tuple(data["launcher"].get("label", ())),
        launcher_mpi=data["launcher"].get("mpi", ""),
        login_env=_text(data.get("login_env", {})),
        cores=node.get("cores"),
        hwthreads=node.get("hwthreads"),
        gpus=node.get("gpus", 0),
        gpu=Gpu(**gpu) if gpu else None,
        cpu=Cpu(_strings(cpu.get("lists", ())), cpu.get("bound_by", "launcher")),
        nic=Nic(nic["variable"], _strings(nic["order"])) if nic else None,
        **_networks(data.get("network")),
        numa=tuple(
            Numa(domain["cpus"], _strings(domain.get("gpus", ())), _strings(domain.get("nics", ())))
            for domain in node.get("numa", ())
        ),
        queues={key: _queue(key, value) for key, value in data.get("queues", {}).items()},
        limits=limits,
        default_account=defaults.get("account"),
        default_queue=defaults.get("queue"),
        default_walltime_min=minutes(defaults["walltime"]) if "walltime" in defaults else None,
        default_filesystems=tuple(defaults.get("filesystems", ())),
        env=_text(data.get("env", {})),
        libraries=tuple(
            Library(
                key,
                _text(value.get("env", {})),
                tuple(value.get("path", ())),
                tuple(value.get("directives", ())),
                value.get("use", True),
            )
            for key, value in data.get("libraries", {}).items()
        ),
        **_plain(data, Site, "network"),
    )


def _plain(data: Mapping[str, Any], kind: type[Site | Queue], left_out: str) -> dict[str, Any]:
    """Return the texts, numbers and lists whose keys are fields of a dataclass, except one."""
    known = {each.name for each in fields(kind)} - {left_out}
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in data.items()
        if key in known and not isinstance(value, dict)
    }


def _strings(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(map(str, values))


def _text(mapping: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in mapping.items()}


def _networks(data: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return the network of the nodes: hardware, or an emulated one on this machine."""
    if not isinstance(data, str):
        return {"network": None if data is None else _network(data)}
    emulated = parse_network(data, "network:")
    if emulated is None:
        return {}
    return {
        "emulated_network": emulated.text,
        "network": Network(
            topology="none",
            nics=1,
            nic_gbps=emulated.rate_bits_s / 1e9,
            source=f"emulated on this machine: network: {data}",
            across_us=emulated.latency_us or None,
        ),
    }


def _network(data: Mapping[str, Any]) -> Network:
    def part(key: str) -> dict[str, Any]:
        return {k: v for k, v in data.get(key, {}).items() if k not in ("source", "verify")}

    return Network(
        topology=data["topology"],
        nics=data["nics"],
        nic_gbps=data["nic_gbps"],
        source=data["source"],
        dragonfly=Dragonfly(**part("dragonfly")) if "dragonfly" in data else None,
        fat_tree=FatTree(**part("fat_tree")) if "fat_tree" in data else None,
        **part("latency"),
        **part("within"),
    )


def _queue(name: str, data: Mapping[str, Any]) -> Queue:
    least, most = data["walltime"]
    return Queue(
        name=name,
        walltime_min=(minutes(least), minutes(most)),
        bins=tuple(Bin((low, high), minutes(most)) for low, high, most in data.get("bins", ())),
        limits={key: data[key] for key in LIMITS if key in data},
        **_plain(data, Queue, "bins"),
    )
