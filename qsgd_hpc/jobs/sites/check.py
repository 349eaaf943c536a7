"""Check a profile: its files, unconfirmed facts, and differences from the machine."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qsgd_hpc.errors import LaunchError, UsageError
from qsgd_hpc.jobs.sites import Host, is_login_host, live, usable
from qsgd_hpc.jobs.sites.files import Merged, dotted, merged, unconfirmed
from qsgd_hpc.jobs.sites.live import Live, LiveQueue
from qsgd_hpc.jobs.sites.profile import Queue, Site, build
from qsgd_hpc.jobs.sites.schema import Position
from qsgd_hpc.jobs.words import clock, listing

__all__ = ["Report", "differences", "examine"]


@dataclass(frozen=True)
class Report:
    """The result of a check.

    Attributes:
        fault: why the profile cannot be used, else empty.
        unconfirmed: one row for each mark: fact, position of the mark (where).
        compared: the source of the comparison, or why there was none.
        differs: one row for each difference: fact, profile, machine, position of the change.
    """

    name: str
    fault: str = ""
    unconfirmed: tuple[Mapping[str, str], ...] = ()
    compared: str = ""
    differs: tuple[Mapping[str, str], ...] = ()

    @property
    def is_sound(self) -> bool:
        """Return whether no change is needed."""
        return not self.fault and not self.differs


def examine(name: str, host: Host, *, ask_machine: bool = True) -> Report:
    """Check one profile; on the machine that it describes, compare it with the scheduler, too."""
    try:
        found = merged(name)
    except UsageError as error:
        return Report(name, fault=str(error))
    marks = [
        {"fact": dotted(path), "where": str(found.origin(path))} for path in unconfirmed(found)
    ]
    compared, rows = "not compared with the machine", ()
    if ask_machine:
        compared, rows = _compared(found, build(name, found.data), host)
    return Report(name, unconfirmed=tuple(marks), compared=compared, differs=rows)


def _compared(found: Merged, site: Site, host: Host) -> tuple[str, tuple[Mapping[str, str], ...]]:
    """Return the source of the comparison, or why there was none; and the differences."""
    if reason := _no_comparison(site, host):
        return reason, ()
    try:
        machine = live.look(site.scheduler)
    except LaunchError as error:
        return f"not compared: {error}", ()
    said = f"compared with {live.ASKED[site.scheduler]} on this machine"
    if machine.unanswered:
        said += "; incomplete: " + "; ".join(machine.unanswered)
    return said, tuple(_row(found, each) for each in differences(site, machine))


def _row(found: Merged, difference: Difference) -> dict[str, str]:
    where = f"{found.origin(difference.path)}: {difference.change}"
    return {
        "fact": dotted(difference.path),
        "profile": difference.profile,
        "machine": difference.machine,
        "change": where,
    }


def _no_comparison(site: Site, host: Host) -> str:
    """Return why the profile cannot be compared with this machine, else an empty text."""
    command = live.ASKED.get(site.scheduler)
    if command is None or site.generic:
        return "not compared: it describes no machine with queues"
    if not shutil.which(command):
        return f"not compared: there is no {command} here; run this on {site.name}"
    if not is_login_host(site, host):
        for other, its in usable()[0].items():
            if other != site.name and is_login_host(its, host):
                return f"not compared: this is a login host of {other}"
    return ""


@dataclass(frozen=True)
class Difference:
    """One difference: its position in the profile, both values, and the change to make there."""

    path: Position
    profile: str
    machine: str
    change: str


def differences(site: Site, live: Live) -> Iterator[Difference]:
    """Yield the differences; values that the machine does not report are not compared."""
    if site.nodes and live.nodes and site.nodes != live.nodes:
        yield _simple(("nodes",), site.nodes, live.nodes)
    nodes = list(_node(site, live.cpus, live.gpus, None))
    yield from nodes
    if live.filesystems and set(site.filesystems) != set(live.filesystems):
        yield _simple(("filesystems",), _flow(site.filesystems), _flow(live.filesystems))
    for queue in site.queues.values():
        yield from _queue(site, queue, live, compare_nodes=not nodes)
    yield from _extra(site, live)


def _simple(path: Position, profile: object, machine: object) -> Difference:
    return Difference(path, str(profile), str(machine), f"{path[-1]}: {machine}")


def _flow(words: tuple[str, ...]) -> str:
    return f"[{', '.join(words)}]"


def _node(
    site: Site, cpus: tuple[int, ...], gpus: tuple[int, ...], queue: Queue | None
) -> Iterator[Difference]:
    """Compare the numbers of cores and GPUs per node, of the machine or of one queue."""
    own = site.at(queue.name) if queue else site
    top: Position = ("queues", queue.name) if queue else ("node",)
    # If ranks use tiles, the profile counts tiles, but the scheduler may count cards.
    written = site.gpu is not None and any("." in device for device in site.gpu.order)
    cards = own.gpus // (site.gpu.tiles if site.gpu else 1)
    if gpus and not written and not {own.gpus, cards} & set(gpus):
        yield _simple((*top, "gpus"), own.gpus, listing(map(str, gpus)))
    # Some schedulers count cores, others hardware threads.
    if cpus and own.cores and not {own.cores, own.hwthreads} & set(cpus):
        threads = f" (hwthreads: {own.hwthreads})" if own.hwthreads else ""
        yield Difference(
            (*top, "cores"),
            f"{own.cores}{threads}",
            f"{listing(map(str, cpus))} CPUs",
            f"cores: {listing(map(str, cpus))}, or half of that with two threads per core",
        )


def _queue(site: Site, queue: Queue, live: Live, *, compare_nodes: bool) -> Iterator[Difference]:
    path: Position = ("queues", queue.name)
    parts = []
    for kind, name, known in _names(site, queue, live):
        if known and name not in known:
            yield Difference(path, "exists", f"no {kind} {name}", "delete this entry")
            return
        if known:
            parts.append(known[name])
    if not parts:
        return
    if compare_nodes:
        yield from _node(site, parts[0].cpus, parts[0].gpus, queue)
    yield from _ranges(queue, parts)
    routes = parts[0].routes
    if routes and set(routes) != set(queue.routes):
        yield _simple((*path, "routes"), _flow(queue.routes), _flow(routes))
    if parts[0].route_only and queue.via is None:
        yield Difference((*path, "via"), "open to users", "routed jobs only", "via: ITS ROUTE")


def _names(site: Site, queue: Queue, live: Live) -> Iterator[tuple[str, str, dict[str, LiveQueue]]]:
    """Yield (kind, name, all of this kind on the machine) for the partition and QOS of a queue."""
    partition, qos = site.partition_and_qos(queue.name)
    if partition:
        kind = "partition" if live.scheduler == "slurm" else "queue"
        yield kind, partition, dict(live.queues)
    if qos:
        yield "QOS", qos, dict(live.qos)


def _ranges(queue: Queue, parts: list[LiveQueue]) -> Iterator[Difference]:
    path: Position = ("queues", queue.name)
    low = max((n for part in parts if (n := part.nodes[0]) is not None), default=queue.nodes[0])
    high = min((n for part in parts if (n := part.nodes[1]) is not None), default=queue.nodes[1])
    if (low, high) != queue.nodes:
        yield _simple((*path, "nodes"), list(queue.nodes), [low, high])
    least = [w for part in parts if (w := part.walltime_min[0]) is not None]
    most = [w for part in parts if (w := part.walltime_min[1]) is not None]
    machine = (max(least, default=queue.walltime_min[0]), min(most, default=queue.walltime_min[1]))
    if machine != queue.walltime_min:
        said = [
            "[" + ", ".join(f'"{clock(m)}"' for m in pair) + "]"
            for pair in (queue.walltime_min, machine)
        ]
        yield _simple((*path, "walltime"), *said)


def _extra(site: Site, live: Live) -> Iterator[Difference]:
    """Find queues that are open to users, but neither in the profile nor in its ``left_out``."""
    known = live.qos if site.queue_kind == "qos" else live.queues
    named = {name for queue in site.queues.values() for _, name, _ in _names(site, queue, live)}
    for name, queue in known.items():
        left_out = any(fnmatch.fnmatch(name, pattern) for pattern in site.left_out)
        if queue.is_open and name not in named and not left_out:
            yield Difference(
                ("queues",), f"no '{name}'", "exists", f"add {name}, or name it in left_out"
            )
