"""Time that ranks take to agree on what to carry out, by a discrete simulation of their tree.

Each rank hears every child once, tells its parent, and hands on the answer (csrc/engine/tree.cc,
relay.cc). A closed form would not do: ranks are ready at different times, and one that has waited
for long sleeps when it is told. Messages of few bytes load no link, so no topology is in here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from qsgd_hpc.scaling.predict.fabric import Fabric
from qsgd_hpc.scaling.predict.schedules import Layout

__all__ = [
    "FRAME_S",
    "TENSOR_S",
    "Agreement",
    "agreement",
    "arrivals",
    "parents",
    "root_s",
    "simulate",
]

FRAME_S = 1e-6
"""Sending a message, or reading one: 0.4 us in the engine, and what MPI does for it."""
TENSOR_S = 0.1e-6
"""Reading one takes longer by this for each tensor that it names."""
FAN_OUT, MOST_NEAR = 8, 24
STAR = 1 + MOST_NEAR + FAN_OUT
"""So many ranks are a star around rank 0 (csrc/engine/tree.h)."""
# A rank that waits is awake for so long; then it naps, ever longer (csrc/transport/transport.cc),
# if it is a relay at most so long, or that part of its wait (csrc/engine/engine_loop.cc).
AWAKE_S = 220e-6
FIRST_NAP_S, GROWTH, GROWING = 50e-6, 1.2, 22
RELAY_NAP_S, RELAY_SHARE = 400e-6, 0.02
LONGEST_WAIT_S = 60.0
DRAWS = 8


@dataclass(frozen=True)
class Agreement:
    """What it takes to agree once.

    Attributes:
        seconds: from when the last rank is ready until the last one knows what to carry out.
        heard: messages that rank 0 reads; it sends as many.
        depth: messages from the farthest rank to rank 0, one after the other.
    """

    seconds: float
    heard: int
    depth: int


@cache
def agreement(layout: Layout, fabric: Fabric, tensors: int, spread_s: float = 0.0) -> Agreement:
    """Return what it takes in the engine's own tree; see `simulate` and `arrivals`."""
    return simulate(parents(layout), layout, fabric, tensors, arrivals(layout, spread_s))


def root_s(heard: int, agreements: int, tensors: int) -> float:
    """Return rank 0's work for so many agreements, which name so many tensors in all."""
    return heard * (agreements * 2 * FRAME_S + tensors * TENSOR_S)


def parents(layout: Layout, fan_out: int = 0) -> np.ndarray:
    """Return the parent of each rank, which is before it; 0 of rank 0: int64, shape (ranks,).

    Args:
        layout: the ranks; those of a node share memory.
        fan_out: leaders below a leader (QSGD_FAN_OUT); 0: a star of few ranks, and 8 of many.
    """
    ranks = np.arange(layout.ranks)
    if not fan_out and layout.ranks <= STAR:
        return np.zeros_like(ranks)
    node, place = np.divmod(ranks, layout.per_node)
    above = np.maximum(node - 1, 0) // (fan_out or FAN_OUT)
    home = layout.per_node * np.where(place > 0, node, above)
    found: np.ndarray = home + np.maximum(place - 1, 0) // MOST_NEAR
    return found


def arrivals(layout: Layout, spread_s: float = 0.0) -> np.ndarray:
    """Return when each rank is ready, normally distributed, shape (draws, ranks)."""
    draws = DRAWS if spread_s else 1
    return np.random.default_rng(0).normal(0.0, spread_s, (draws, layout.ranks))


def simulate(
    parent: np.ndarray, layout: Layout, fabric: Fabric, tensors: int, ready_s: np.ndarray
) -> Agreement:
    """Return what it takes to agree on known tensors, all of which a rank submits at once.

    Args:
        parent: of each rank, as from `parents`.
        layout, fabric: the ranks, and what a message between two of them takes.
        tensors: that each message names.
        ready_s: when each rank is ready, shape (draws, ranks); the result is of all draws' mean.
    """
    read_s = FRAME_S + tensors * TENSOR_S
    node = np.arange(layout.ranks) // layout.per_node
    hop_s = np.where(node == node[parent], fabric.within_s, fabric.across_s)
    levels = list(_levels(parent))
    # A star has none: no wait adds to another.
    relays = np.isin(np.arange(layout.ranks), parent if len(levels) > 1 else [])
    told_s = ready_s.copy()  # its parent, or itself at rank 0
    for ranks, children in reversed(levels):
        came_s = np.where(children < 0, np.inf, told_s[:, children] + FRAME_S + hop_s[children])
        now_s = told_s[:, ranks]
        for arrived_s in np.moveaxis(np.sort(came_s), 2, 0):
            heard_s = _noticed(now_s, arrived_s, relays[ranks]) + read_s
            now_s = np.where(np.isinf(arrived_s), now_s, heard_s)
        told_s[:, ranks] = now_s
    known_s = told_s.copy()
    for ranks, children in levels:
        row, place = np.nonzero(children >= 0)
        child = children[row, place]
        came_s = known_s[:, ranks[row]] + (place + 1) * FRAME_S + hop_s[child]
        known_s[:, child] = _noticed(told_s[:, child], came_s, relays[child]) + read_s
    seconds = float((known_s.max(axis=1) - ready_s.max(axis=1)).mean())
    return Agreement(seconds, levels[0][1].shape[1] if levels else 0, len(levels))


def _levels(parent: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ranks of each level that have children, and these; -1 where one has fewer."""
    above, rest = np.zeros(1, np.int64), np.arange(1, len(parent))
    while len(rest):
        here = np.isin(parent[rest], above)
        ours, rest = rest[here], rest[~here]
        ours = ours[np.argsort(parent[ours], kind="stable")]
        ranks, row, counts = np.unique(parent[ours], return_inverse=True, return_counts=True)
        place = np.arange(len(ours)) - np.repeat(np.cumsum(counts) - counts, counts)
        children = np.full((len(ranks), counts.max()), -1)
        children[row, place] = ours
        yield ranks, children
        above = ours


def _noticed(since_s: np.ndarray, came_s: np.ndarray, relay: np.ndarray) -> np.ndarray:
    """Return when ranks that have waited since then begin to read a message."""
    waited_s = came_s - since_s
    woken_s = np.where(relay, _woken(waited_s, True), _woken(waited_s, False))
    return np.where(waited_s <= AWAKE_S, np.maximum(since_s, came_s), since_s + woken_s)


def _woken(waited_s: np.ndarray, relay: bool) -> np.ndarray:
    wakes_s = _wakes(relay)
    found: np.ndarray = wakes_s[np.minimum(np.searchsorted(wakes_s, waited_s), len(wakes_s) - 1)]
    return found


@cache
def _wakes(relay: bool) -> np.ndarray:
    """Return when a rank that waits ends its naps, from the beginning of its wait."""
    times_s = [AWAKE_S]
    while times_s[-1] < LONGEST_WAIT_S:
        nap_s = FIRST_NAP_S * GROWTH ** min(len(times_s), GROWING)
        if relay:
            nap_s = min(nap_s, max(RELAY_NAP_S, RELAY_SHARE * (times_s[-1] - AWAKE_S)))
        times_s.append(times_s[-1] + nap_s)
    return np.array(times_s)
