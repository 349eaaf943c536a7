"""The engine's thread during one step: which gradients travel together, and what stays exposed."""

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
    """One gradient: float32 elements, when it is submitted, whether it is coded."""

    count: int
    ready_s: float
    coded: bool = False


@dataclass(frozen=True)
class StepTimeline:
    """What one step's reductions take.

    Attributes:
        comm_s: the engine's thread is at work.
        agree_s: of that, until ranks have agreed on what to reduce.
        exposed_s: from the last gradient's submission to the end of the last reduction.
        collectives: how many reductions.
        agreements: how often ranks agreed.
    """

    comm_s: float
    agree_s: float
    exposed_s: float
    collectives: int
    agreements: int


def fused(ready: Sequence[Gradient], fusion_bytes: int) -> list[list[Gradient]]:
    """Return which of the gradients that are ready travel together (csrc/engine/ready_queue.cc).

    Each reduction takes the oldest gradient and those behind it that are coded alike, up to the
    first that would pass the limit; the others may have been passed over.
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
    """Return what the engine makes of one step.

    It takes all gradients that are ready, reduces them one batch after the other, and looks again.

    Args:
        gradients: in order of submission, with times from the first one on.
        end_s: when the backward pass ends, on the same clock.
        reduce_s: seconds of one reduction, by elements and whether they are coded.
        agree_s: seconds to agree, by gradients and whether ranks have waited for them: those that
            became ready during a reduction find all ranks together at its end.
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
    """Return the mean of the largest of so many independent standard normal numbers."""
    if ranks < 2:
        return 0.0
    x = np.linspace(-9.0, 9.0, 7201)
    cumulative = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x]) ** ranks
    return float(np.sum((x[1:] + x[:-1]) / 2 * np.diff(cumulative)))
