"""The machine of a prediction: rates and times from a site profile or from options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsgd_hpc.errors import UsageError
from qsgd_hpc.jobs.sites.profile import Dragonfly, FatTree, Site
from qsgd_hpc.scaling.predict.schedules import Layout, Messages

__all__ = ["Fabric", "card_loads", "card_messages", "fabric_of_site", "flat_fabric"]

# Defaults for values that a profile does not give; every prediction lists those it used.
USUAL_ACROSS_S = 2e-6
USUAL_WITHIN_S = 0.5e-6
USUAL_MEMORY = 100e9


@dataclass(frozen=True)
class Fabric:
    """Network and memory of a machine.

    Attributes:
        name: name of the site, or a description.
        cards: network cards of a node; a rank sends through one of them.
        card_bandwidth: bytes/s of one card in each direction.
        across_s, within_s: latency of a message between nodes and within one.
        memory_bandwidth: bytes/s that all ranks of a node together move through its memory.
        host_bandwidth: bytes/s from one GPU to memory; None if gradients are in host memory.
        shape: topology between the cards; None if only the cards limit.
        assumptions: values assumed because they were not given, as text.
    """

    name: str
    cards: int
    card_bandwidth: float
    across_s: float
    within_s: float
    memory_bandwidth: float
    host_bandwidth: float | None = None
    shape: Dragonfly | FatTree | None = None
    assumptions: tuple[str, ...] = ()


def fabric_of_site(site: Site) -> Fabric:
    """Return the machine of a site profile.

    Raises:
        UsageError: the profile has no `network`.
    """
    network = site.network
    if network is None:
        raise UsageError(
            f"site {site.name!r} has no `network` in its profile, so nothing can be predicted for "
            f"it. Add `network:` to its profile (jobs/README.md), or give --link-gbps and "
            "--link-latency-us."
        )
    assumed: list[str] = []
    across_us, within_us = network.across_us, network.within_us
    if across_us is None or within_us is None:
        across_us, within_us = USUAL_ACROSS_S * 1e6, USUAL_WITHIN_S * 1e6
        assumed.append(f"a message costs {across_us:g} us between nodes (not in the profile)")
    memory = USUAL_MEMORY
    if network.memory_gbs is None:
        assumed.append(f"a node's memory moves {memory / 1e9:g} GB/s (not in the profile)")
    else:
        memory = network.memory_gbs * 1e9
    return Fabric(
        site.name,
        network.nics,
        network.nic_gbps * 1e9 / 8,
        across_us / 1e6,
        within_us / 1e6,
        memory,
        network.host_gbs * 1e9 if network.host_gbs and site.gpus else None,
        network.dragonfly or network.fat_tree,
        tuple(assumed),
    )


def flat_fabric(
    name: str, gbps: float, latency_us: float = 50.0, memory_gbs: float = USUAL_MEMORY / 1e9
) -> Fabric:
    """Return nodes limited only by one link each, such as hosts on one switch.

    Args:
        name: a description.
        gbps, memory_gbs: rates of a link in Gb/s and of a node's memory in GB/s, above 0.
        latency_us: of a message between nodes, 0 or more.
    """
    return Fabric(name, 1, gbps * 1e9 / 8, latency_us / 1e6, USUAL_WITHIN_S, memory_gbs * 1e9)


def cards_of(ranks: np.ndarray, layout: Layout, cards: int) -> np.ndarray:
    """Return the card that each rank sends through, numbered over all nodes."""
    node, local = np.divmod(ranks, layout.per_node)
    used: np.ndarray = node * cards + local * cards // layout.per_node
    return used


def _near(messages: Messages, layout: Layout) -> np.ndarray:
    """Return which messages stay within a node."""
    near: np.ndarray = messages.sources // layout.per_node == messages.targets // layout.per_node
    return near


def card_loads(rounds: Sequence[Messages], layout: Layout, cards: int) -> tuple[float, float]:
    """Return the most bytes that any card sends or receives, and the most within any node."""
    most = within = 0.0
    messages = Messages.joined(rounds)
    near = _near(messages, layout)
    if near.any():
        nodes = messages.sources[near] // layout.per_node
        within = np.bincount(nodes, weights=messages.bytes[near]).max()
    if not near.all():
        far = ~near
        most = max(
            np.bincount(cards_of(ends[far], layout, cards), weights=messages.bytes[far]).max()
            for ends in (messages.sources, messages.targets)
        )
    return float(most), float(within)


def card_messages(rounds: Sequence[Messages], layout: Layout, cards: int) -> Messages:
    """Return the traffic between cards in these rounds: one message for each pair."""
    messages = Messages.joined(rounds)
    far = ~_near(messages, layout)
    total = layout.nodes * cards
    source, target = (
        cards_of(ends[far], layout, cards) for ends in (messages.sources, messages.targets)
    )
    keys, places = np.unique(source * total + target, return_inverse=True)
    summed = np.bincount(places, weights=messages.bytes[far], minlength=len(keys))
    return Messages(keys // total, keys % total, summed)
