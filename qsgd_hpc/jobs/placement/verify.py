"""``submit --verify-pinning``: a short job that shows the placement of its ranks."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from qsgd_hpc.jobs.model import Job, JobRequest
from qsgd_hpc.jobs.placement.faults import Fault, job_faults, node_faults
from qsgd_hpc.jobs.placement.picture import WIDTH, alike, draw, draw_node, to_ascii
from qsgd_hpc.jobs.placement.seats import Node, expected, parse_places
from qsgd_hpc.jobs.script import known_launcher
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.launch import place

__all__ = ["pinning_preview", "pinning_report", "pinning_request"]

WALLTIME_MIN = 5.0  # no known queue requires more
LOG_LINES = 15
HOSTS_NAMED = 3


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
    _print(console, draw_node(planned, None))
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
    for node, hosts in alike(nodes):
        for fault in node_faults(node, site, planned):
            faults.setdefault(fault, []).extend(hosts)
    _print(console, _conclusion(nodes, list(faults.items())))
    return not any(fault.severe for fault in faults)


def _print(console: Console, text: Text) -> None:
    """Print in the terminal's character set, without markup and wrapping."""
    plain = not console.encoding.lower().startswith("utf")
    console.print(to_ascii(text) if plain else text, soft_wrap=True, highlight=False)


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
    more = f" and {len(hosts) - HOSTS_NAMED} more nodes" if len(hosts) > HOSTS_NAMED else ""
    return f" on {', '.join(hosts[:HOSTS_NAMED])}{more}"


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
