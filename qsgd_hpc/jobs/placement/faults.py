"""Find faults in the placement of a node's ranks, with remedies. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from qsgd_hpc.jobs.placement.seats import Node, Seat
from qsgd_hpc.jobs.sites.profile import Site
from qsgd_hpc.jobs.words import listing, plural
from qsgd_hpc.launch.place import cpu_list

__all__ = ["Fault", "job_faults", "node_faults", "ranks_named"]


@dataclass(frozen=True)
class Fault:
    """One fault and its remedy. ``severe`` is false if the profile plans no other placement."""

    what: str
    remedy: str
    severe: bool = True


def node_faults(node: Node, site: Site, planned: Node | None = None) -> list[Fault]:
    """Return the faults of one node; their texts name local ranks.

    Args:
        node: the actual or the planned placement.
        site: the profile.
        planned: the placement of the profile, if known.
    """
    return [
        *_shared_gpus(node, site),
        *_no_gpu(node, planned, site),
        *_far_gpus(node, site),
        *_cores(node, planned),
        *_too_many_threads(node),
    ]


def job_faults(nodes: Sequence[Node], ranks: int, site: Site) -> list[Fault]:
    """Return faults over all nodes: ranks without a report, or with the same number."""
    found = [seat.rank for node in nodes for seat in node.seats]
    if found and len(set(found)) < len(found):
        twice = sorted(rank for rank, count in Counter(found).items() if count > 1)
        return [
            Fault(
                f"{len(found)} processes reported, but {ranks_named(twice)} more than once: the "
                "launcher sets no variable with their ranks that is known here",
                f"Start ranks with the launcher of their MPI, and name its variable in the profile "
                f"of {site.name}: local_rank_variables: [NAME].",
            )
        ]
    missing = sorted(set(range(ranks)) - set(found))
    if missing:
        return [
            Fault(
                f"{ranks_named(missing)} of {ranks} did not report",
                "See the log for the messages of ranks that could not start.",
            )
        ]
    return list(_torchrun_faults([seat for node in nodes for seat in node.seats], ranks))


def _torchrun_faults(seats: Sequence[Seat], ranks: int) -> Iterator[Fault]:
    """Find ranks of torch.distributed that would not connect to all others."""
    having = [seat for seat in seats if seat.torchrun]
    wrong = [s for s in having if s.torchrun[:3] != (str(s.rank), str(ranks), str(s.local_rank))]
    if wrong:
        first = wrong[0]
        yield Fault(
            f"{ranks_named(seat.rank for seat in wrong)}: RANK, WORLD_SIZE and LOCAL_RANK are not "
            f"those of the launcher; rank {first.rank}, local rank {first.local_rank}, has "
            f"{', '.join(first.torchrun[:3])}",
            "Leave them out of --env and of what the site's setup exports; pin.sh sets them.",
        )
    places = sorted({seat.torchrun[3] for seat in having})
    if len(places) > 1 or any("?" in place for place in places):
        yield Fault(
            f"ranks of torch.distributed would meet at {listing(places, 'and')}",
            "They need one MASTER_ADDR and MASTER_PORT: leave both out of --env, and see that "
            "the job's folder is one that all nodes share.",
        )
    elif having and len(having) < len(seats):
        lacking = [seat.rank for seat in seats if not seat.torchrun]
        yield Fault(
            f"{ranks_named(lacking)} {'was' if len(lacking) == 1 else 'were'} not told where ranks "
            "of torch.distributed meet",
            "Name the launcher's variable in the profile: local_rank_variables: [NAME].",
        )


def ranks_named(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-3, 5``."""
    numbers = list(ranks)
    text = cpu_list(numbers).replace(",", ", ")
    return f"rank{'' if len(numbers) == 1 else 's'} {text}"


def _shared_gpus(node: Node, site: Site) -> Iterator[Fault]:
    users: dict[str, list[int]] = {}
    for seat in node.seats:
        if seat.gpu is not None:
            users.setdefault(seat.gpu, []).append(seat.local_rank)
    variable = site.gpu.variable if site.gpu else "the variable that names GPUs"
    too_many = 0 < site.gpus < len(node.seats)
    for gpu, ranks in users.items():
        if len(ranks) > 1:
            yield Fault(
                f"{ranks_named(ranks)} share GPU {gpu}",
                f"Use --ranks-per-node {site.gpus} or fewer."
                if too_many
                else f"Do not set {variable} yourself; if you do not, check gpu.order and "
                "local_rank_variables in the profile.",
                severe=not too_many,
            )


def _no_gpu(node: Node, planned: Node | None, site: Site) -> Iterator[Fault]:
    wanted = {seat.local_rank for seat in planned.seats if seat.gpu} if planned else set()
    without = [s.local_rank for s in node.seats if s.gpu is None and s.local_rank in wanted]
    if without and site.gpu:
        yield Fault(
            f"{ranks_named(without)} {'sees' if len(without) == 1 else 'see'} no GPU",
            f"Check that the job asks for GPUs (directives in the profile), and that nothing sets "
            f"{site.gpu.variable} to nothing.",
        )


def _far_gpus(node: Node, site: Site) -> Iterator[Fault]:
    if node.is_unbound:
        return
    far = [seat for seat in node.seats if node.is_far(seat)]
    if not far:
        return
    seat = far[0]
    home, around = node.home(seat.gpu), node.around(seat.cpus)
    where = listing([f"NUMA {domain.number}" for domain in around], "and")
    yield Fault(
        f"{ranks_named(s.local_rank for s in far)} far from "
        f"{'its GPU' if len(far) == 1 else 'their GPUs'}: rank {seat.local_rank} runs in {where}, "
        f"its GPU {seat.gpu} is in NUMA {home.number if home else '?'}",
        _order_remedy(node, site),
    )


def _order_remedy(node: Node, site: Site) -> str:
    """Return the order in which every rank gets a GPU near its cores, if there is one."""
    if site.gpu and site.gpu.bound_by == "launcher":
        return "The launcher binds GPUs here: look at its options, launcher.argv in the profile."
    order: list[str] = []
    for seat in node.seats:
        near = (gpu for domain in node.around(seat.cpus) for gpu in domain.gpus)
        order += [gpu for gpu in near if gpu not in order][:1]
    if len(order) < len(node.seats):
        return "Bind each rank to cores beside its GPU: cpu.lists in the profile."
    listed = ", ".join(order)
    return f"Set gpu.order to {listed}: the GPUs near the ranks' cores, by local rank."


def _cores(node: Node, planned: Node | None) -> Iterator[Fault]:
    if node.is_unbound:
        if node.seats[0].cpus:
            promised = planned is not None and any(seat.cpus for seat in planned.seats)
            yield Fault(
                f"no rank is bound: all {len(node.seats)} may run on cores "
                f"{cpu_list(node.cores(node.seats[0].cpus))}",
                "List the cores of each local rank in the profile, cpu: {bound_by: wrapper, lists: "
                "[...]}, or give its launcher an option that binds.",
                severe=promised,
            )
        return
    owners: dict[int, list[int]] = {}
    for seat in node.seats:
        for core in node.cores(seat.cpus):
            owners.setdefault(core, []).append(seat.local_rank)
    shared = [core for core, ranks in owners.items() if len(ranks) > 1]
    if shared:
        ranks = sorted({rank for core in shared for rank in owners[core]})
        yield Fault(
            f"{ranks_named(ranks)} overlap on cores {cpu_list(shared)}",
            "Give each rank cores of its own: cpu.lists in the profile, or fewer ranks on a node.",
        )


def _too_many_threads(node: Node) -> Iterator[Fault]:
    crowded = [seat for seat in node.seats if node.is_crowded(seat)]
    if crowded:
        least = min(len(node.cores(seat.cpus)) for seat in crowded)
        yield Fault(
            f"{ranks_named(seat.local_rank for seat in crowded)}: OMP_NUM_THREADS="
            f"{crowded[0].omp_threads} for {plural(least, 'core')}",
            f"Use --env OMP_NUM_THREADS={least}, or give each rank more cores.",
        )
