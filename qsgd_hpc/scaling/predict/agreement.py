"""Time that ranks take to agree on the next collectives, by discrete simulation of their tree.

Each rank receives one message from every child, sends one to its parent, and forwards the answer
(csrc/engine/tree.cc, relay.cc). A closed form is not sufficient: ranks are ready at different
times, and a rank that has waited for long sleeps when a message arrives. These messages are too
small to load a link, so the topology is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from qsgd_hpc.scaling.predict.fabric import Fabric
from qsgd_hpc.scaling.predict.schedules import Layout

__all__ = ["FRAME_S", "STAR", "TENSOR_S", "agreement", "arrivals", "parents", "root_s", "simulate"]

FRAME_S = 1e-6
"""Seconds to send or to read a message: 0.4 us in the engine, the rest in MPI."""
TENSOR_S = 0.1e-6
"""Additional seconds to read a message, per tensor that it names."""
FAN_OUT, MOST_NEAR = 8, 24
STAR = 1 + MOST_NEAR + FAN_OUT
"""Up to this many ranks form a star around rank 0 (csrc/engine/tree.h)."""
# A waiting rank polls for AWAKE_S, then sleeps between polls for increasing times
# (csrc/transport/transport.cc). A relay sleeps at most RELAY_NAP_S, or RELAY_SHARE of its wait so
# far if that is longer (csrc/engine/engine_loop.cc).
AWAKE_S = 220e-6
FIRST_NAP_S, GROWTH, GROWING = 50e-6, 1.2, 22
RELAY_NAP_S, RELAY_SHARE = 400e-6, 0.02
LONGEST_WAIT_S = 60.0
DRAWS = 8


@dataclass(frozen=True)
class Agreement:
    """The cost of one agreement.

    Attributes:
        seconds: from when the last rank is ready until the last rank has the answer.
        root_messages: messages that rank 0 reads; it sends the same number.
        depth: number of consecutive messages from the farthest rank to rank 0.
    """

    seconds: float
    root_messages: int
    depth: int


@cache
def agreement(layout: Layout, fabric: Fabric, tensors: int, spread_s: float = 0.0) -> Agreement:
    """Return the cost of an agreement in the engine's tree; see `simulate` and `arrivals`."""
    return simulate(parents(layout), layout, fabric, tensors, arrivals(layout, spread_s))


def root_s(root_messages: int, agreements: int, tensors: int) -> float:
    """Return rank 0's seconds of work for a number of agreements about `tensors` in total.

    Args:
        root_messages: see `Agreement`.
        agreements: number of agreements.
        tensors: number of tensors in all agreements together.
    """
    return root_messages * (agreements * 2 * FRAME_S + tensors * TENSOR_S)


def parents(layout: Layout, fan_out: int = 0) -> np.ndarray:
    """Return the parent of each rank, always a lower rank (0 for rank 0): int64, shape (ranks,).

    Args:
        layout: the ranks; ranks of a node share memory.
        fan_out: leaders below a leader (QSGD_FAN_OUT); 0: a star up to STAR ranks, then FAN_OUT.
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
    """Return the times at which ranks are ready, normally distributed, shape (draws, ranks)."""
    draws = DRAWS if spread_s else 1
    return np.random.default_rng(0).normal(0.0, spread_s, (draws, layout.ranks))


def simulate(
    parent: np.ndarray, layout: Layout, fabric: Fabric, tensors: int, ready_s: np.ndarray
) -> Agreement:
    """Return the cost of an agreement on known tensors, which each rank submits together.

    Args:
        parent: parent of each rank, as from `parents`.
        layout, fabric: the ranks, and the time of a message between two of them.
        tensors: number of tensors that each message names.
        ready_s: when each rank is ready, shape (draws, ranks); the result is the mean over draws.
    """
    read_s = FRAME_S + tensors * TENSOR_S
    node = np.arange(layout.ranks) // layout.per_node
    hop_s = np.where(node == node[parent], fabric.within_s, fabric.across_s)
    levels = list(_levels(parent))
    # A star has no relays: its waits do not add up.
    relays = np.isin(np.arange(layout.ranks), parent if len(levels) > 1 else [])
    sent_s = ready_s.copy()  # when a rank sends to its parent; for rank 0: when it can answer
    for ranks, children in reversed(levels):
        arrivals_s = np.where(children < 0, np.inf, sent_s[:, children] + FRAME_S + hop_s[children])
        now_s = sent_s[:, ranks]
        for arrived_s in np.moveaxis(np.sort(arrivals_s), 2, 0):
            done_s = _noticed(now_s, arrived_s, relays[ranks]) + read_s
            now_s = np.where(np.isinf(arrived_s), now_s, done_s)
        sent_s[:, ranks] = now_s
    answered_s = sent_s.copy()
    for ranks, children in levels:
        row, place = np.nonzero(children >= 0)
        child = children[row, place]
        arrived_s = answered_s[:, ranks[row]] + (place + 1) * FRAME_S + hop_s[child]
        answered_s[:, child] = _noticed(sent_s[:, child], arrived_s, relays[child]) + read_s
    seconds = float((answered_s.max(axis=1) - ready_s.max(axis=1)).mean())
    return Agreement(seconds, levels[0][1].shape[1] if levels else 0, len(levels))


def _levels(parent: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ranks of each level that have children, and their children, padded with -1."""
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


def _noticed(since_s: np.ndarray, arrived_s: np.ndarray, relay: np.ndarray) -> np.ndarray:
    """Return when ranks that wait from since_s begin to read a message that arrives."""
    waited_s = arrived_s - since_s
    woken_s = np.where(relay, _woken(waited_s, True), _woken(waited_s, False))
    return np.where(waited_s <= AWAKE_S, np.maximum(since_s, arrived_s), since_s + woken_s)


def _woken(waited_s: np.ndarray, relay: bool) -> np.ndarray:
    wakes_s = _wakes(relay)
    found: np.ndarray = wakes_s[np.minimum(np.searchsorted(wakes_s, waited_s), len(wakes_s) - 1)]
    return found


@cache
def _wakes(relay: bool) -> np.ndarray:
    """Return the times at which a waiting rank wakes up, in seconds since its wait began."""
    times_s = [AWAKE_S]
    while times_s[-1] < LONGEST_WAIT_S:
        nap_s = FIRST_NAP_S * GROWTH ** min(len(times_s), GROWING)
        if relay:
            nap_s = min(nap_s, max(RELAY_NAP_S, RELAY_SHARE * (times_s[-1] - AWAKE_S)))
        times_s.append(times_s[-1] + nap_s)
    return np.array(times_s)
