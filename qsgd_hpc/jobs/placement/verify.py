"""``submit --verify-pinning``: a short job that shows the placement of its ranks.

The picture of a node is text for a terminal of 80 columns, with colours if supported: a box for
each NUMA domain, with its cores, GPUs and ranks.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from qsgd_hpc.jobs.model import Job, JobRequest
from qsgd_hpc.jobs.placement.faults import Fault, job_faults, node_faults, ranks_named
from qsgd_hpc.jobs.placement.seats import Domain, Node, Seat, expected, parse_places
from qsgd_hpc.jobs.script import known_launcher
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.jobs.words import plural
from qsgd_hpc.launch import place
from qsgd_hpc.launch.place import cpu_list

__all__ = ["draw", "pinning_preview", "pinning_report", "pinning_request"]

WALLTIME_MIN = 5.0  # no known queue requires more
LOG_LINES = 15
WIDTH = 80
BAR = 52  # columns for the cores of one domain
FULL, PART, FREE = "■", "▪", "·"
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")
_ASCII = str.maketrans("■▪·╭╮╰╯─│✗✓≠", "#+.++++-|x*!")


def pinning_request(request: JobRequest, site: Site) -> JobRequest:
    """Return the request for a job of the same shape whose ranks report their placement.

    Nodes, ranks, environment and pinning are kept; array, chain, dependencies and restarts are
    removed.
    """
    shown = [part.variable for part in (site.gpu, site.nic) if part]
    launcher = known_launcher(site)
    return dataclasses.replace(
        request,
        script=Path(place.__file__),
        script_args=(
            *(word for name in site.local_rank_variables for word in ("--local-rank", name)),
            *(("--launcher", launcher) if launcher else ()),
            *(word for name in shown for word in ("--show", name)),
        ),
        name="pinning",
        walltime_min=WALLTIME_MIN,
        array={},
        at_once=None,
        after=(),
        chain=1,
        requeue=False,
        stop_before_min=None,
        key=None,
    )


def pinning_preview(request: JobRequest, site: Site, console: Console) -> bool:
    """Show the planned placement of a filled request; return whether it has no fault."""
    planned = expected(site, request)
    if not any(seat.cpus or seat.gpu for seat in planned.seats):
        _print(
            console, Text(f"{site.name}: the profile defines no pinning; ranks run on any core.")
        )
        return True
    nodes = "its node" if request.nodes == 1 else f"each of the {request.nodes} nodes"
    _print(console, Text(f"{site.name}: planned pinning for {nodes}", "bold"))
    _print(console, _draw_node(planned, None))
    faults = [(fault, [""]) for fault in node_faults(planned, site, planned)]
    _print(console, _conclusion([planned], faults))
    return not any(fault.severe for fault, _ in faults)


def pinning_report(job: Job, site: Site, console: Console) -> bool:
    """Show the placement of the ranks of an ended pinning job; return whether it has no fault.

    Args:
        job: submitted with :func:`pinning_request`; its request is filled.
        site: its profile.
        console: the output, which needs 80 columns.
    """
    text = ""
    if job.log_path.is_file():
        text = job.log_path.read_text("utf-8", "replace")
    nodes = parse_places(text, site)
    if not nodes:
        end = "\n".join(f"  {line}" for line in text.splitlines()[-LOG_LINES:]) or "  (empty)"
        _print(console, Text(f"{job.id} is {job.state.value}, and no rank reported its pinning."))
        _print(console, Text(f"The end of its log, {job.log_path}:\n{end}"))
        return False
    planned = expected(site, job.request)
    _print(console, draw(nodes, planned))
    _print(console, _torchrun_line(nodes))
    faults: dict[Fault, list[str]] = {
        fault: [] for fault in job_faults(nodes, job.request.ranks, site)
    }
    for node, hosts in _alike(nodes):
        for fault in node_faults(node, site, planned):
            faults.setdefault(fault, []).extend(hosts)
    _print(console, _conclusion(nodes, list(faults.items())))
    return not any(fault.severe for fault in faults)


def _print(console: Console, text: Text) -> None:
    """Print in the terminal's character set, without markup and wrapping."""
    plain = not console.encoding.lower().startswith("utf")
    console.print(_to_ascii(text) if plain else text, soft_wrap=True, highlight=False)


def _conclusion(nodes: Sequence[Node], faults: Iterable[tuple[Fault, list[str]]]) -> Text:
    text = Text()
    for fault, hosts in sorted(faults, key=lambda item: not item[0].severe):
        sign, style = ("✗", "bold red") if fault.severe else ("·", "yellow")
        text.append(_folded(f"{sign} {fault.what}{_on(hosts, len(nodes))}."), style)
        text.append(_folded(f"  {fault.remedy}"))
    if not text:
        text.append(f"✓ {_summary(nodes)}\n", "green")
    return text


def _torchrun_line(nodes: Sequence[Node]) -> Text:
    """Return torchrun's variables of the last rank."""
    seats = [seat for node in nodes for seat in node.seats if seat.torchrun]
    if not seats:
        return Text("Torchrun's variables are not set for the ranks.")
    rank, size, local, place = seats[-1].torchrun
    return Text(
        _folded(
            f"torchrun's variables of the last rank: RANK={rank} WORLD_SIZE={size} "
            f"LOCAL_RANK={local}, and they meet at {place}."
        ).rstrip()
    )


def _folded(sentence: str) -> str:
    return textwrap.fill(sentence, WIDTH, subsequent_indent="  ") + "\n"


def _on(hosts: list[str], of: int) -> str:
    """Return the nodes of a fault, if there are several nodes."""
    if of == 1 or not hosts:
        return ""
    if len(hosts) == of:
        return f" on all {of} nodes"
    return f" on {_some(hosts, 3, ' nodes')}"


def _some(hosts: Sequence[str], most: int, unit: str = "") -> str:
    """Return at most so many names, and the number of the others."""
    more = f" and {len(hosts) - most} more{unit}" if len(hosts) > most else ""
    return f"{', '.join(hosts[:most])}{more}"


def _summary(nodes: Sequence[Node]) -> str:
    """Describe the correct placement, limited to facts known for every rank."""
    every = [(node, seat) for node in nodes for seat in node.seats]
    own = []
    if not any(node.is_unbound for node in nodes) and all(seat.cpus for _, seat in every):
        own.append("cores")
    if all(seat.gpu is not None for _, seat in every):
        own.append("a GPU")
    beside = own == ["cores", "a GPU"] and all(node.home(seat.gpu) for node, seat in every)
    has = f"has {' and '.join(own)} of its own" if own else "reported; no fault was found"
    who = f"Each of {len(every)} ranks" if len(every) > 1 else "The rank"
    return f"{who} {has}{', one beside the other' if beside else ''}."


def _to_ascii(text: Text) -> Text:
    """Return a picture in ASCII, with the same width."""
    return Text(text.plain.translate(_ASCII), spans=text.spans)


def _alike(nodes: Sequence[Node]) -> list[tuple[Node, list[str]]]:
    """Return each distinct placement with its hosts, the most frequent first."""
    groups: dict[tuple[object, ...], tuple[Node, list[str]]] = {}
    for node in nodes:
        places = tuple((s.local_rank, s.cpus, s.gpu, s.nic, s.omp_threads) for s in node.seats)
        key = (places, node.domains, node.threads)
        groups.setdefault(key, (node, []))[1].append(node.host)
    return sorted(groups.values(), key=lambda group: -len(group[1]))


def draw(nodes: Sequence[Node], planned: Node | None = None) -> Text:
    """Return the picture of all nodes, with each distinct placement once."""
    result = Text()
    for node, hosts in _alike(nodes):
        result.append("\n" if result else "")
        many = f"{len(hosts)} equal nodes: " if len(hosts) > 1 else ""
        result.append(f"{many}{_some(hosts, 4)}", "bold").append(f"  {_count(node)}\n")
        result.append_text(_draw_node(node, planned))
    return result


def _count(node: Node) -> str:
    ranks = plural(len(node.seats), "rank")
    ranks += f", {threads} threads each" if (threads := _same_threads(node)) else ""
    first, last = node.seats[0], node.seats[-1]
    if first.rank == first.local_rank:
        return ranks
    if first == last:
        return f"{ranks} ({first.rank} of all)"
    return f"{ranks} (rank {first.local_rank} here is {first.rank} of all)"


def _same_threads(node: Node) -> int | None:
    """Return OMP_NUM_THREADS if it is the same for every rank of the node."""
    every = {seat.omp_threads for seat in node.seats}
    return every.pop() if len(every) == 1 else None


def _draw_node(node: Node, planned: Node | None = None) -> Text:
    """Return the boxes of one node.

    Args:
        node: ranks by local rank, in their domains.
        planned: the placement of the profile; ranks with another placement are marked.
    """
    wanted = {seat.local_rank: seat for seat in planned.seats} if planned else {}
    text = Text()
    drawn: set[int] = set()
    for domain in node.domains:
        rows = _rows(node, domain, wanted)
        drawn |= {seat.local_rank for seat in _seats(node, domain)}
        title = ["whole node" if domain.number is None else f"NUMA {domain.number}"]
        title += [_cores(node, domain)] if domain.cpus else []
        title += [_named("GPU", domain.gpus)] if domain.gpus else []
        title += [", ".join(domain.nics)] if domain.nics else []
        text.append_text(_box(" ─ ".join(title), rows))
    outside = [seat for seat in node.seats if seat.local_rank not in drawn]
    for seat in outside:
        text.append_text(_label(seat)).append_text(_facts(node, seat)).append("\n")
    return text


def _cores(node: Node, domain: Domain) -> str:
    cores = node.cores(domain.cpus)
    listed = cpu_list(cores)
    return f"cores {listed}" if len(listed) < 20 else f"{len(cores)} cores"


def _named(what: str, values: Sequence[str]) -> str:
    return f"{what}{'' if len(values) == 1 else 's'} {', '.join(values)}"


def _box(title: str, rows: list[Text]) -> Text:
    text = Text()
    head = f"╭─ {title} "
    text.append(head[: WIDTH - 1] + "─" * (WIDTH - 1 - len(head)) + "╮\n", "dim")
    for row in rows:
        row.truncate(WIDTH - 4, overflow="ellipsis", pad=True)
        text.append("│ ", "dim").append_text(row).append(" │\n", "dim")
    return text.append("╰" + "─" * (WIDTH - 2) + "╯\n", "dim")


def _seats(node: Node, domain: Domain) -> list[Seat]:
    """Return the ranks that run in a domain, or whose cores are unknown and whose GPU is in it."""
    return [
        seat
        for seat in node.seats
        if seat.cpus & domain.cpus or (not seat.cpus and node.home(seat.gpu) == domain)
    ]


def _rows(node: Node, domain: Domain, wanted: dict[int, Seat]) -> list[Text]:
    here = _seats(node, domain)
    nobody_is_bound = node.is_unbound and bool(node.seats[0].cpus & domain.cpus)
    if nobody_is_bound:
        here = [seat for seat in node.seats if node.home(seat.gpu) == domain]
    facts = [
        _facts(node, seat)
        if _main(node, seat) in (domain, None) or nobody_is_bound
        else Text("here too", "dim")
        for seat in here
    ]
    groups = _groups(node, domain, WIDTH - 15 - max((len(text) for text in facts), default=0))
    rows = [_ruler(groups)] if len(node.cores(domain.cpus)) > 8 else []
    if nobody_is_bound:
        bar = _bar(node, groups, node.seats[0])
        rows.append(Text.assemble("all      ", bar, "  ", ("not bound", "bold red")))
    for seat, fact in zip(here, facts, strict=True):
        bar = Text(" " * len(groups)) if nobody_is_bound else _bar(node, groups, seat)
        bar.stylize(_style(seat))
        rows.append(Text.assemble(_label(seat), bar, "  ", fact))
        difference = _difference(node, seat, wanted.get(seat.local_rank))
        if difference and fact.plain != "here too":
            rows.append(Text(f"         ≠ the profile plans {difference}", "yellow"))
    return rows or [Text("no rank", "dim")]


def _main(node: Node, seat: Seat) -> Domain | None:
    """Return the domain in which a rank is listed: that of its GPU, if it runs there."""
    around, home = node.around(seat.cpus), node.home(seat.gpu)
    return home if home in around else next(iter(around), None)


def _style(seat: Seat) -> str:
    return _COLOURS[seat.local_rank % len(_COLOURS)]


def _label(seat: Seat) -> Text:
    return Text(f"{f'rank {seat.local_rank}':<9}", f"bold {_style(seat)}")


def _groups(node: Node, domain: Domain, columns: int) -> list[list[int]]:
    """Return the cores of a domain, grouped by terminal column."""
    cores = sorted(node.cores(domain.cpus))
    each = max(1, math.ceil(len(cores) / max(1, min(BAR, columns))))
    return [cores[at : at + each] for at in range(0, len(cores), each)]


def _ruler(groups: list[list[int]]) -> Text:
    line = ""
    for column, group in enumerate(groups):
        if column % 8 == 0:
            line = f"{line:<{column}}{group[0]}"
    each = f"  {FULL} is {len(groups[0])} cores" if len(groups[0]) > 1 else ""
    return Text(f"{'core':<9}{line:<{len(groups)}}{each}", "dim")


def _bar(node: Node, groups: list[list[int]], seat: Seat) -> Text:
    own = node.cores(seat.cpus)
    signs = ""
    for group in groups:
        count = len(own & set(group))
        signs += FREE if not count else FULL if count == len(group) else PART
    return Text(signs)


def _facts(node: Node, seat: Seat) -> Text:
    """Return the text after a rank's cores: GPU, card, and faults."""
    parts = []
    if seat.gpu is not None:
        parts.append(Text(f"GPU {seat.gpu}", _style(seat)))
        others = [s.local_rank for s in node.seats if s.gpu == seat.gpu and s is not seat]
        if others:
            parts.append(Text(f"✗ shared with {ranks_named(others)}", "bold red"))
        home = node.home(seat.gpu)
        if node.is_far(seat) and home:
            parts.append(Text(f"✗ far, in NUMA {home.number}", "bold red"))
    if seat.nic is not None:
        parts.append(Text(seat.nic))
    if node.is_crowded(seat):
        parts.append(Text(f"✗ {seat.omp_threads} threads", "bold red"))
    elif seat.omp_threads is not None and _same_threads(node) is None:
        parts.append(Text(f"{seat.omp_threads} threads", "dim"))
    if not seat.cpus:
        parts.append(Text("cores unknown", "dim"))
    return Text("  ").join(parts)


def _difference(node: Node, seat: Seat, wanted: Seat | None) -> str:
    """Return the profile's placement of a rank if it differs, else an empty text."""
    if wanted is None:
        return ""
    parts = []
    if wanted.cpus and node.cores(wanted.cpus) != node.cores(seat.cpus):
        parts.append(f"cores {cpu_list(node.cores(wanted.cpus))}")
    if wanted.gpu is not None and wanted.gpu != seat.gpu:
        parts.append(f"GPU {wanted.gpu}")
    return ", ".join(parts)
