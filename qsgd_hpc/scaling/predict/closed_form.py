"""Time of messages limited only by latency, network cards and memory: alpha and beta per level.

A message costs alpha (one value between nodes, another within a node). Its bytes pass the cards of
the sender and the receiver, or the node's memory. Hockney's model, as in csrc/planner/cost_model.h.
"""

from __future__ import annotations

from typing import Protocol

from qsgd_hpc.scaling.predict.fabric import Fabric, card_loads
from qsgd_hpc.scaling.predict.schedules import Layout, Messages, Phase, Schedule

__all__ = ["ClosedForm", "Network", "phase_s"]

COPIES = 2
"""Passes over memory of a message within a node: into and out of the shared memory."""


class Network(Protocol):
    """A model of contention in the network beyond the network cards."""

    name: str

    def slowdown(self, schedule: Schedule, phase: Phase) -> float:
        """Return the phase's time between nodes over that of the closed form, 1 or more."""


class ClosedForm:
    """A network without contention beyond the network cards."""

    name = "closed form"

    def slowdown(self, schedule: Schedule, phase: Phase) -> float:
        return 1.0


def phase_s(
    phase: Phase, schedule: Schedule, fabric: Fabric, network: Network
) -> tuple[float, float]:
    """Return the seconds of a phase: those of its latencies, and those of its bytes."""
    layout = schedule.layout
    if phase.together:
        rounds = [[phase.at(i) for i in range(phase.rounds)]]
        repeats, messages = 1, phase.rounds
    elif phase.alike:
        rounds, repeats, messages = [[phase.at(0)]], phase.rounds, 1
    else:
        rounds, repeats, messages = [[phase.at(i)] for i in range(phase.rounds)], 1, 1
    slow = network.slowdown(schedule, phase)
    latency_s = wire_s = 0.0
    for each in rounds:
        alpha_s, across_s, within_s = _parts(each, layout, fabric)
        latency_s += repeats * messages * alpha_s
        wire_s += repeats * max(across_s * slow, within_s)
    return latency_s, wire_s


def _parts(rounds: list[Messages], layout: Layout, fabric: Fabric) -> tuple[float, float, float]:
    """Return the seconds of one message's latency, and of the bytes at cards and in memory."""
    across, within = card_loads(rounds, layout, fabric.cards)
    alpha_s = fabric.across_s if across else fabric.within_s
    return alpha_s, across / fabric.card_bandwidth, COPIES * within / fabric.memory_bandwidth
