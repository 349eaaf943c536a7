"""Draw a node: a box for each NUMA domain, with its cores, GPUs and ranks.

Pure: text for a terminal of 80 columns, with colours if supported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from qsgd_hpc.jobs.placement.faults import ranks_named
from qsgd_hpc.jobs.placement.seats import Domain, Node, Seat
from qsgd_hpc.jobs.words import plural
from qsgd_hpc.launch.place import cpu_list

__all__ = ["WIDTH", "alike", "draw", "draw_node", "same_threads", "to_ascii"]

WIDTH = 80
BAR = 52  # columns for the cores of one domain
FULL, PART, FREE = "■", "▪", "·"
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")
_ASCII = str.maketrans("■▪·╭╮╰╯─│✗✓≠", "#+.++++-|x*!")
HOSTS_NAMED = 4


def to_ascii(text: Text) -> Text:
    """Return a picture in ASCII, with the same width."""
    return Text(text.plain.translate(_ASCII), spans=text.spans)


def alike(nodes: Sequence[Node]) -> list[tuple[Node, list[str]]]:
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
    for node, hosts in alike(nodes):
        result.append("\n" if result else "")
        shown = ", ".join(hosts[:HOSTS_NAMED])
        more = f" and {len(hosts) - HOSTS_NAMED} more" if len(hosts) > HOSTS_NAMED else ""
        many = f"{len(hosts)} equal nodes: " if len(hosts) > 1 else ""
        result.append(f"{many}{shown}{more}", "bold").append(f"  {_count(node)}\n")
        result.append_text(draw_node(node, planned))
    return result


def _count(node: Node) -> str:
    ranks = plural(len(node.seats), "rank")
    ranks += f", {threads} threads each" if (threads := same_threads(node)) else ""
    first, last = node.seats[0], node.seats[-1]
    if first.rank == first.local_rank:
        return ranks
    return f"{ranks} (rank {first.local_rank} here is {first.rank} of all)" if first != last else (
        f"{ranks} ({first.rank} of all)"
    )  # fmt: skip


def same_threads(node: Node) -> int | None:
    """Return OMP_NUM_THREADS if it is the same for every rank of the node."""
    every = {seat.omp_threads for seat in node.seats}
    return every.pop() if len(every) == 1 else None


def draw_node(node: Node, planned: Node | None = None) -> Text:
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
    elif seat.omp_threads is not None and same_threads(node) is None:
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
