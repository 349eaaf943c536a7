"""Prediction of step times on any number of nodes, from a training and a machine.

The engine's thread fuses the gradients of a step and reduces them one batch after the other. A
message costs alpha (one value between nodes, another within a node). Its bytes pass the cards of
the sender and the receiver, or the node's memory. Hockney's model, as in csrc/planner/cost_model.h.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qsgd_hpc.env import COMPRESSED
from qsgd_hpc.scaling.define.study import PLAIN_BITS
from qsgd_hpc.scaling.predict.agreement import agreement, root_s
from qsgd_hpc.scaling.predict.fabric import Fabric, card_loads
from qsgd_hpc.scaling.predict.inputs import TrainingProfile
from qsgd_hpc.scaling.predict.schedules import (
    FLOAT_BYTES,
    Coding,
    Layout,
    Phase,
    Schedule,
    schedule,
)

__all__ = ["ClosedForm", "Network", "Prediction", "Setting", "predict", "predict_one"]

FUSION_BYTES = 64 << 20


@dataclass(frozen=True)
class Gradient:
    """One gradient: its float32 elements, when it is submitted, and whether it is compressed."""

    count: int
    ready_s: float
    coded: bool = False


@dataclass(frozen=True)
class StepTimeline:
    """Times and counts of one step's reductions.

    Attributes:
        comm_s: seconds that the engine's thread works.
        agree_s: the part of comm_s in which ranks agree on what to reduce.
        exposed_s: from the end of the backward pass to the end of the last reduction.
        collectives: number of reductions.
        agreements: number of agreements.
    """

    comm_s: float
    agree_s: float
    exposed_s: float
    collectives: int
    agreements: int


def fused(ready: Sequence[Gradient], fusion_bytes: int) -> list[list[Gradient]]:
    """Return the ready gradients in batches, one per reduction (csrc/engine/ready_queue.cc).

    Each batch takes the oldest gradient and, in order, all later ones of equal coding, up to the
    first one that would exceed the limit. Gradients of another coding are skipped.
    """
    waiting = deque(ready)
    batches = []
    while waiting:
        first = waiting.popleft()
        batch, rest, full = [first], deque[Gradient](), False
        size = first.count * 4
        for gradient in waiting:
            alike = not full and gradient.coded == first.coded
            full = full or (alike and size + gradient.count * 4 > fusion_bytes)
            if alike and not full:
                size += gradient.count * 4
                batch.append(gradient)
            else:
                rest.append(gradient)
        waiting = rest
        batches.append(batch)
    return batches


def timeline(
    gradients: Sequence[Gradient],
    end_s: float,
    reduce_s: Callable[[int, bool], float],
    *,
    agree_s: Callable[[int, bool], float] = lambda *_: 0.0,
    fusion_bytes: int = FUSION_BYTES,
) -> StepTimeline:
    """Return the engine's work in one step.

    In a loop, it takes all gradients that are ready and reduces them batch by batch.

    Args:
        gradients: in order of submission; times count from the first one.
        end_s: when the backward pass ends, on the same clock.
        reduce_s: seconds of one reduction, by elements and whether they are compressed.
        agree_s: seconds to agree, by the number of gradients and whether ranks waited for them. For
            gradients that became ready during a reduction, all ranks begin together at its end.
        fusion_bytes: QSGD_FUSION_BYTES.
    """
    waiting = deque(sorted(gradients, key=lambda g: g.ready_s))
    now, busy, agreeing = -math.inf, 0.0, 0.0
    collectives = agreements = 0
    while waiting:
        next_s = waiting[0].ready_s
        waited = next_s > now
        now = max(now, next_s)
        taken = []
        while waiting and waiting[0].ready_s <= now:
            taken.append(waiting.popleft())
        agreements += 1
        spent = agree_s(len(taken), waited)
        agreeing += spent
        for batch in fused(taken, fusion_bytes):
            spent += reduce_s(sum(g.count for g in batch), batch[0].coded)
            collectives += 1
        now += spent
        busy += spent
    return StepTimeline(busy, agreeing, max(0.0, now - end_s), collectives, agreements)


def expected_maximum(ranks: int) -> float:
    """Return the mean of the largest of `ranks` independent standard normal numbers."""
    if ranks < 2:
        return 0.0
    x = np.linspace(-9.0, 9.0, 7201)
    cumulative = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x]) ** ranks
    return float(np.sum((x[1:] + x[:-1]) / 2 * np.diff(cumulative)))


COPIES = 2
"""Passes over memory of a message within a node: into and out of the shared memory."""
SEGMENT_BYTES = 256 << 10
MEMORY_PASSES = 5
"""Passes of a gradient over memory in the reduction within a node: copy into shared memory (2), sum
(1), copy out of it (2)."""
MIN_ELEMENTS = 1024
"""Smaller gradients are not compressed (QSGD_MIN_ELEMENTS)."""


@dataclass(frozen=True)
class Setting:
    """Settings of the predicted run.

    Attributes:
        ranks_per_node: ranks on each node.
        mode: "weak" keeps the batch of each rank constant, "strong" the batch of all ranks.
        speedup: speed of computing relative to the measurement; 1 for the same processors.
        algorithm: setting of the engine.
        overlaps: False if no gradient is reduced before the backward pass ends.
    """

    ranks_per_node: int = 1
    mode: str = "weak"
    speedup: float = 1.0
    algorithm: str = "auto"
    overlaps: bool = True


@dataclass(frozen=True)
class Prediction:
    """One row: seconds per step, unit per second, and shares from 0 to 1.

    step_s is the sum of compute_s, straggler_s, staging_s, data_s and exposed_s. comm_s is the
    total work of the engine's thread, hidden or not; agree_s is the part of it in which ranks agree
    on what to reduce, and root_s rank 0's work for that. efficiency is relative to ranks that never
    wait for each other.
    """

    nodes: int
    ranks: int
    bits: int
    by: str
    step_s: float
    compute_s: float
    straggler_s: float
    staging_s: float
    data_s: float
    exposed_s: float
    comm_s: float
    agree_s: float
    root_s: float
    throughput: float
    speedup: float
    efficiency: float
    collectives: int


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
    if phase.rounds == 0:  # of the leaders of a single node
        return 0.0, 0.0
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
        across, within = card_loads(each, layout, fabric.cards)
        latency_s += repeats * messages * (fabric.across_s if across else fabric.within_s)
        within_s = COPIES * within / fabric.memory_bandwidth
        wire_s += repeats * max(across / fabric.card_bandwidth * slow, within_s)
    return latency_s, wire_s


def allreduce_s(
    plan: Schedule, count: int, work_s: float, fabric: Fabric, network: Network
) -> float:
    """Return the seconds of one reduction of `count` float32.

    Coding and summing (work_s on each rank) overlap with the transfers: the time is that of the
    longer one plus the first segment of the other (as in csrc/planner/cost_model.cc).
    """
    latency_s = wire_s = 0.0
    for phase in plan.phases:
        more = phase_s(phase, plan, fabric, network)
        latency_s, wire_s = latency_s + more[0], wire_s + more[1]
    memory_s = 0.0
    if plan.memory_phases:
        size = plan.layout.per_node * count * FLOAT_BYTES
        memory_s = MEMORY_PASSES * size / fabric.memory_bandwidth
        latency_s += 2 * plan.memory_phases * fabric.within_s
    segments = max(1.0, math.ceil(wire_s * fabric.card_bandwidth / SEGMENT_BYTES))
    overlapped = max(wire_s, work_s) + min(wire_s, work_s) / segments
    return latency_s + memory_s + overlapped


def predict(
    training: TrainingProfile,
    fabric: Fabric,
    setting: Setting,
    nodes: Sequence[int],
    bits: Sequence[int],
    network: Network,
) -> list[Prediction]:
    """Return a prediction for every number of nodes and bits, in this order."""
    return [
        predict_one(training, fabric, setting, count, each, network)
        for count in nodes
        for each in bits
    ]


def predict_one(
    training: TrainingProfile,
    fabric: Fabric,
    setting: Setting,
    nodes: int,
    bits: int,
    network: Network,
) -> Prediction:
    """Return the prediction for a number of nodes and bits."""
    layout = Layout(nodes * setting.ranks_per_node, setting.ranks_per_node)
    # The batch of a rank relative to the measurement.
    share = training.ranks / layout.ranks if setting.mode == "strong" else 1.0
    faster = share / setting.speedup
    compute_s = training.compute_s * faster
    backward_s = training.backward_s * faster
    gradients = [
        Gradient(
            count,
            ready * faster if setting.overlaps else backward_s,
            bits != PLAIN_BITS and count >= MIN_ELEMENTS,
        )
        for count, ready in training.layers
    ]
    alone = layout.ranks == 1
    spread_s = training.jitter * compute_s

    def agree_s(tensors: int, waited: bool) -> float:
        if training.buckets:
            return 0.0
        return agreement(layout, fabric, tensors, spread_s if waited else 0.0).seconds

    @functools.cache
    def reduce_s(count: int, coded: bool) -> float:
        # Algorithms for float32 cannot send codes, and vice versa.
        fits = (setting.algorithm in COMPRESSED) == coded
        wanted = setting.algorithm if fits else "auto"
        if training.buckets:
            wanted = "sra" if coded else "ring"
        plan = schedule(wanted, layout, [(count, 0)], Coding(bits) if coded else None)
        per_element_s = training.coding_of(bits if coded else PLAIN_BITS)[0]
        own = plan.coded if coded else count // (1 if training.buckets else layout.per_node)
        return allreduce_s(plan, count, own * per_element_s, fabric, network)

    step = timeline(
        gradients,
        backward_s,
        reduce_s,
        agree_s=agree_s,
        fusion_bytes=0 if training.buckets else FUSION_BYTES,
    )
    exposed_s = 0.0 if alone else step.exposed_s
    staging_s = 0.0 if alone else _staging_s(training, fabric)
    straggler_s = spread_s * expected_maximum(layout.ranks)
    step_s = compute_s + straggler_s + staging_s + training.data_s + exposed_s
    throughput = layout.ranks * training.batch * share / step_s
    speedup = throughput / training.throughput(setting.speedup)
    return Prediction(
        nodes,
        layout.ranks,
        bits,
        network.name,
        step_s,
        compute_s,
        straggler_s,
        staging_s,
        training.data_s,
        exposed_s,
        0.0 if alone else step.comm_s,
        step.agree_s,
        0.0
        if training.buckets
        else root_s(agreement(layout, fabric, 1).root_messages, step.agreements, len(gradients)),
        throughput,
        speedup,
        speedup / layout.ranks,
        0 if alone else step.collectives,
    )


def _staging_s(training: TrainingProfile, fabric: Fabric) -> float:
    if training.staged or fabric.host_bandwidth is None:
        return 0.0
    return 2 * training.parameters * FLOAT_BYTES / fabric.host_bandwidth
