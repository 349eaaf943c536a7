"""Views of site profiles, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.commands.columns import Column, fitting_table
from qsgd_hpc.jobs.sites.build import build
from qsgd_hpc.jobs.sites.check import Report
from qsgd_hpc.jobs.sites.merge import Merged, dotted, merged, unconfirmed
from qsgd_hpc.jobs.sites.profile import Library, Network, Queue, Site
from qsgd_hpc.jobs.sites.queues import limit_words, remark
from qsgd_hpc.jobs.sites.sources import sources
from qsgd_hpc.jobs.words import clock, counted, listing

__all__ = [
    "Row",
    "differences_table",
    "network_words",
    "profile_json",
    "report_lines",
    "row",
    "site_lines",
    "table",
]


@dataclass(frozen=True)
class Row:
    """One profile in `sites list`. ``fault``: why it cannot be used, or empty."""

    name: str
    here: bool
    description: str = ""
    scheduler: str = ""
    queues: int = 0
    gpus: int = 0
    unconfirmed: int = 0
    retired: str | None = None
    layers: tuple[str, ...] = ()
    fault: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the row for --json."""
        return asdict(self)


def row(name: str, here: str | None) -> Row:
    """Return the row of a profile, which may be faulty."""
    layers: tuple[str, ...] = ()
    try:
        layers = tuple(source.layer for source in sources(name))
        found = merged(name)
    except UsageError as error:
        return Row(name, name == here, layers=layers, fault=str(error))
    site = build(name, found.data)
    return Row(
        name,
        name == here,
        site.description,
        site.scheduler,
        len(site.queues),
        site.gpus,
        len(unconfirmed(found)),
        site.retired,
        layers,
    )


def table(rows: Sequence[Row], width: int) -> Table:
    """Return the table that `sites list` prints, for a terminal of this width."""
    texts = [_texts(row) for row in rows]
    titles = ("", "site", "scheduler", "queues", "GPUs", "to verify", "from", "what it is")
    value = {"queues": 3, "GPUs": 4, "to verify": 2, "from": 1}
    columns = [
        Column(
            title,
            [row[i] for row in texts],
            least=24 if title == "what it is" else None,
            value=value.get(title),
            wraps=title == "what it is",
            right=title in ("queues", "GPUs", "to verify"),
        )
        for i, title in enumerate(titles)
    ]
    return fitting_table(columns, width)


def _texts(row: Row) -> tuple[Text, ...]:
    what = "not usable, see `qsgd-hpc sites check`" if row.fault else row.description
    retired = " (retired)" if row.retired else ""
    return (
        Text("*" if row.here else ""),
        Text(row.name),
        Text(row.scheduler),
        *(Text(str(n) if n else "") for n in (row.queues, row.gpus, row.unconfirmed)),
        Text(", ".join(row.layers)),
        Text(what + retired, style="red" if row.fault else "dim" if retired else ""),
    )


def report_lines(report: Report) -> list[str]:
    """Return the output of `sites check` before the table of differences."""
    if report.fault:
        return [f"{report.name}: fault", *(f"  {line}" for line in report.fault.splitlines())]
    found = len(report.differs)
    end = f", {found} difference{'s' if found != 1 else ''}" if report.differs else ""
    lines = [f"{report.name}: files are sound; {report.compared}{end}"]
    width = max((len(fact) for fact, _ in report.unconfirmed), default=0)
    return lines + [f"  to verify  {fact:<{width}}  {at}" for fact, at in report.unconfirmed]


def differences_table(report: Report) -> Table:
    """Return the table of differences, with the line to change."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("fact", "profile", "machine", "change"):
        result.add_column(column, overflow="fold")
    for row in report.differs:
        result.add_row(*(Text(row[key]) for key in ("fact", "profile", "machine", "change")))
    return result


def site_lines(site: Site) -> list[str]:
    """Return the output of `sites show` before the profile's text."""
    lines = [f"{site.name}: {site.description} ({site.scheduler})"]
    if site.retired:
        lines.append(f"  retired         {site.retired}")
    for queue in site.queues.values():
        lines += _queue_lines(queue)
    rows = (
        ("network", network_words(site.network) if site.network else ""),
        ("libraries", listing([_library_words(each) for each in site.libraries], "and")),
        ("limits", limit_words(site.limits)),
        ("of the day", site.live_limits or ""),
        ("file systems", ", ".join(site.filesystems)),
        ("always needed", ", ".join(site.required)),
    )
    lines += [f"  {label:<16}{text}" for label, text in rows if text]
    return lines + [f"  note: {note}" for note in site.notes]


def _library_words(library: Library) -> str:
    return f"{library.name} ({counted(len(library.env), 'variable') if library.use else 'off'})"


def network_words(network: Network) -> str:
    """Return a network as text, such as 'dragonfly, 2 x 200 Gb/s a node'."""
    words = ["" if network.topology == "none" else network.topology.replace("_", " ")]
    words.append(f"{network.nics} x {network.nic_gbps:g} Gb/s per node")
    if network.dragonfly:
        shape = network.dragonfly
        count = f"{shape.groups} groups" if shape.groups else "groups"
        words.append(f"{count} of {shape.routers} routers with {shape.endpoints} cards each")
    if network.fat_tree:
        leaf = network.fat_tree
        words.append(f"{leaf.leaf_hosts} cards and {leaf.leaf_uplinks} uplinks per leaf")
    if network.across_us is not None:
        words.append(f"{network.across_us:g} us")
    if network.memory_gbs is not None:
        words.append(f"memory {network.memory_gbs:g} GB/s per node")
    return ", ".join(word for word in words if word)


def _queue_lines(queue: Queue) -> list[str]:
    least, most = queue.walltime_min
    extra = f"submit to {queue.via}" if queue.via else remark(queue)
    first = _range(queue.name, queue.nodes, f"{clock(least)} to {clock(most)}  {extra}")
    bins = [_range("", each.nodes, f"up to {clock(each.walltime_min)}") for each in queue.bins]
    return [first, *bins]


def _range(name: str, nodes: tuple[int, int], rest: str) -> str:
    return f"  {name:<16}{f'{nodes[0]} to {nodes[1]} nodes':<20}{rest}".rstrip()


def profile_json(found: Merged) -> dict[str, Any]:
    """Return a merged profile for --json: its data, and file and line of every value."""
    values = {dotted(path): str(found.origin(path)) for path in _leaves(found.data, ())}
    return {
        "name": found.name,
        "profile": found.data,
        "origins": values,
        "unconfirmed": [dotted(path) for path in unconfirmed(found)],
    }


def _leaves(data: Any, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the paths of values other than mappings; a list is one value."""
    if not isinstance(data, dict):
        return [path]
    return [leaf for key, value in data.items() for leaf in _leaves(value, (*path, key))]
