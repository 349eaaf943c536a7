"""Model of the engine's thread during one step: fusion of gradients and exposed communication."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["FUSION_BYTES", "Gradient", "StepTimeline", "expected_maximum", "fused", "timeline"]

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
    cycle_s: float = 0.0,
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
        cycle_s: QSGD_CYCLE_TIME_MS.
        fusion_bytes: QSGD_FUSION_BYTES.
    """
    waiting = deque(sorted(gradients, key=lambda g: g.ready_s))
    now, busy, agreeing = -math.inf, 0.0, 0.0
    collectives = agreements = 0
    while waiting:
        next_s = waiting[0].ready_s + cycle_s
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
