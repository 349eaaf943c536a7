"""The command sites: list, show, check and write site profiles."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs import sites as profiles
from qsgd_hpc.jobs.commands.view import Column, as_json_option, fitting_table, screen
from qsgd_hpc.jobs.sites import live
from qsgd_hpc.jobs.sites.check import Report, examine
from qsgd_hpc.jobs.sites.draft import new_profile
from qsgd_hpc.jobs.sites.files import Merged, dotted, merged, package_faults, sources, unconfirmed
from qsgd_hpc.jobs.sites.profile import Library, Network, Queue, Site, build
from qsgd_hpc.jobs.sites.queues import limit_words, remark
from qsgd_hpc.jobs.words import clock, counted, listing, plural
from qsgd_hpc.launch.schedulers import SCHEDULERS

__all__ = ["sites"]


@click.group("sites")
def sites() -> None:
    """List, show, check or write site profiles.

    Your own profiles are the files $QSGD_HOME/sites/NAME.yaml. Those of a project are
    .qsgd-hpc/sites/NAME.yaml in its folder. Both override the included profile of that name key by
    key.
    """


@sites.command("list")
@as_json_option
def list_sites(as_json: bool) -> None:
    """List all profiles and mark the one in use here."""
    here = _here()
    rows = [_row(name, here) for name in profiles.names()]
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        console = screen()
        console.print(fitting_table(_COLUMNS, [*map(_texts, rows)], console.width))
    for fault in package_faults():
        click.echo(f"qsgd-hpc: {fault}", err=True)


@sites.command("show")
@as_json_option
@click.argument("name", required=False)
def show_site(name: str | None, as_json: bool) -> None:
    """Show the queues, the notes and the YAML files of profile NAME.

    Default: the profile in use here.
    """
    name = name or profiles.choose(None).name
    if as_json:
        click.echo(json.dumps(_profile_json(merged(name)), indent=2))
        return
    click.echo("\n".join(_site_lines(profiles.load(name))))
    for source in sources(name):
        click.echo(f"\n# --- {source.where}\n{source.text}", nl=False)


@sites.command("check")
@click.option("--no-machine", is_flag=True, help="Check the files only; query no scheduler.")
@as_json_option
@click.argument("name", required=False)
def check_site(name: str | None, no_machine: bool, as_json: bool) -> None:
    """Check profile NAME. Default: the one in use here, or all if there is no scheduler.

    Checks its files and lists unconfirmed facts. On the machine itself, compares queues, limits and
    nodes with the scheduler's answers. Exit code 1: a fault or a difference.
    """
    host = profiles.find_host()
    wanted = [name] if name else [profiles.choose(None, host).name]
    if not name and not host.schedulers:
        wanted = profiles.names()
    reports = [examine(each, host, ask_machine=not no_machine) for each in wanted]
    if as_json:
        click.echo(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        for report in reports:
            click.echo("\n".join(_report_lines(report)))
            if report.differs:
                screen().print(_differences_table(report))
                own = env.home() / "sites" / f"{report.name}.yaml"
                click.echo(f"  To override a profile that you cannot edit, key by key: {own}")
    for fault in package_faults():
        click.echo(f"qsgd-hpc: {fault}", err=True)
    sys.exit(0 if all(report.is_sound for report in reports) else 1)


@sites.command("new")
@click.option(
    "--scheduler",
    type=click.Choice([*live.ASKED, *(s for s in SCHEDULERS if s not in (*live.ASKED, "local"))]),
    metavar=f"[{'|'.join(live.ASKED)}]",  # the others are answered with what to do
    help="Default: the scheduler of this machine.",
)
@click.option(
    "--stdout", "to_stdout", is_flag=True, help="Print the profile instead of writing a file."
)
@click.option("--force", is_flag=True, help="Replace an existing profile.")
@click.argument("name")
def new_site(name: str, scheduler: str | None, to_stdout: bool, force: bool) -> None:
    """Write a draft of profile NAME for this machine.

    The draft is made from the answers of its scheduler.
    """
    host = profiles.find_host()
    found = sorted(host.schedulers, key=lambda each: each not in live.ASKED)
    scheduler = scheduler or next(iter(found), None)
    text = new_profile(name, scheduler, host, force=force or to_stdout)
    if to_stdout:
        click.echo(text, nl=False)
        return
    target = env.home() / "sites" / f"{name}.yaml"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, "utf-8")
    click.echo(f"{target} written")
    click.echo(f"  fill in  {len(unconfirmed(merged(name)))} facts to verify, and the comments")
    click.echo(f"  check    qsgd-hpc sites check {name}")
    click.echo(f"  try      qsgd-hpc submit --site {name} --dry-run train.py")


def _here() -> str | None:
    try:
        return profiles.choose(None).name
    except UsageError:
        return None


@dataclass(frozen=True)
class _Row:
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


def _row(name: str, here: str | None) -> _Row:
    """Return the row of a profile, which may be faulty."""
    layers: tuple[str, ...] = ()
    try:
        layers = tuple(source.layer for source in sources(name))
        found = merged(name)
    except UsageError as error:
        return _Row(name, name == here, layers=layers, fault=str(error))
    site = build(name, found.data)
    return _Row(
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


_COLUMNS = (
    Column(""),
    Column("site"),
    Column("scheduler"),
    Column("queues", value=3, right=True),
    Column("GPUs", value=4, right=True),
    Column("to verify", value=2, right=True),
    Column("from", value=1),
    Column("what it is", least=24, wraps=True),
)


def _texts(row: _Row) -> tuple[Text, ...]:
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


def _report_lines(report: Report) -> list[str]:
    """Return the output of `sites check` before the table of differences."""
    if report.fault:
        return [f"{report.name}: fault", *(f"  {line}" for line in report.fault.splitlines())]
    end = f", {plural(len(report.differs), 'difference')}" if report.differs else ""
    lines = [f"{report.name}: files are sound; {report.compared}{end}"]
    marks = report.unconfirmed
    width = max((len(mark["fact"]) for mark in marks), default=0)
    return lines + [f"  to verify  {mark['fact']:<{width}}  {mark['where']}" for mark in marks]


def _differences_table(report: Report) -> Table:
    """Return the table of differences, with the line to change."""
    result = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("fact", "profile", "machine", "change"):
        result.add_column(column, overflow="fold")
    for row in report.differs:
        result.add_row(*(Text(row[key]) for key in ("fact", "profile", "machine", "change")))
    return result


def _site_lines(site: Site) -> list[str]:
    """Return the output of `sites show` before the profile's text."""
    lines = [f"{site.name}: {site.description} ({site.scheduler})"]
    if site.retired:
        lines.append(f"  retired         {site.retired}")
    for queue in site.queues.values():
        lines += _queue_lines(queue)
    rows = (
        ("network", _network_words(site.network) if site.network else ""),
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


def _network_words(network: Network) -> str:
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
    least, most = nodes
    count = "1 node" if most == 1 else f"{least} to {most} nodes"
    return f"  {name:<16}{count:<20}{rest}".rstrip()


def _profile_json(found: Merged) -> dict[str, Any]:
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


if __name__ == "__main__":
    from qsgd_hpc.cli import main_of

    main_of(__spec__.name)
