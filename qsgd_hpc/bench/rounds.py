"""Timing of contestants in alternation, so that disturbances of the machine affect all equally."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsgd_hpc.bench.contestants import Contestant

__all__ = ["Data", "Effort", "time_all"]

BLOCK = 1 << 20  # elements after which the data repeats, so that its exact sum is cheap
SAMPLE_S = 2e-3  # a sample consists of as many calls as take this long together
MOST_CALLS = 100
LARGEST_SUM = 1e30  # each result is the input of the next call, and must stay finite in float32


class Effort:
    """The number of rounds to measure.

    Args:
        rounds: exact number; None: determined by the time.
        seconds: for all contestants of one size together.
    """

    LEAST, MOST = 5, 200

    def __init__(self, rounds: int | None, seconds: float) -> None:
        self._rounds, self._seconds = rounds, seconds

    def rounds(self, round_s: float) -> int:
        """Return the number of rounds for the contestants' total time."""
        if self._rounds is not None:
            return self._rounds
        return max(self.LEAST, min(self.MOST, int(self._seconds / max(round_s, 1e-9))))


class Data:
    """Gaussian gradients, different on each rank, and their exact sum; collective."""

    def __init__(self, comm: Any, mpi: Any, count: int) -> None:
        block = min(count, BLOCK)
        rng = np.random.default_rng([2017, comm.Get_rank()])
        own = rng.standard_normal(block).astype(np.float32)
        self._exact = own.astype(np.float64)
        comm.Allreduce(mpi.IN_PLACE, self._exact)
        self._source = np.resize(own, count)
        self.x: NDArray[np.float32] = np.empty_like(self._source)

    def reset(self) -> None:
        """Restore the gradients."""
        np.copyto(self.x, self._source)

    def nmse(self) -> float:
        """Return the squared error of ``x`` as the sum, over the exact sum's squared magnitude."""
        error = magnitude = 0.0
        for at in range(0, len(self.x), BLOCK):
            got = self.x[at : at + BLOCK]
            exact = self._exact[: len(got)]
            error += float(np.sum(np.square(got - exact)))
            magnitude += float(np.sum(np.square(exact)))
        return error / magnitude


def _slowest(comm: Any, mpi: Any, values: Sequence[float]) -> list[float]:
    found = np.asarray(values, dtype=np.float64)
    comm.Allreduce(mpi.IN_PLACE, found, op=mpi.MAX)
    return list(found)


def _sample_s(contestant: Contestant, data: Data, comm: Any, calls: int) -> float:
    data.reset()
    if calls > 1:
        contestant.run(data.x)  # not timed: the caches contain the previous contestant's data
    comm.Barrier()
    start_s = time.perf_counter()
    for _ in range(calls):
        contestant.run(data.x)
    return (time.perf_counter() - start_s) / calls


def _warm_up(contestants: Sequence[Contestant], data: Data, comm: Any, mpi: Any) -> list[float]:
    """Run each several times; record bytes and errors. Return the seconds of a later run."""
    seconds = []
    for contestant in contestants:
        data.reset()
        sent = contestant.run(data.x)
        if not contestant.is_peer:
            contestant.nmse = data.nmse()
            contestant.wire_bytes = comm.allreduce(sent, op=mpi.MAX)
        seconds.append(_sample_s(contestant, data, comm, 3))
    return _slowest(comm, mpi, seconds)


def time_all(
    contestants: Sequence[Contestant], data: Data, comm: Any, mpi: Any, effort: Effort
) -> None:
    """Fill in ``seconds``, ``wire_bytes`` and ``nmse`` of each; collective.

    A sample is the slowest rank's time between a barrier and its return, over the number of calls
    if they are short.
    """
    estimates_s = _warm_up(contestants, data, comm, mpi)
    most = min(MOST_CALLS, max(1, int(math.log(LARGEST_SUM) / math.log(comm.Get_size()))))
    calls = [max(1, min(most, int(SAMPLE_S / max(s, 1e-9)))) for s in estimates_s]
    rounds = effort.rounds(sum(n * s for n, s in zip(calls, estimates_s, strict=True)))
    for number in range(rounds):
        for turn in range(len(contestants)):
            at = (turn + number) % len(contestants)
            sample_s = _sample_s(contestants[at], data, comm, calls[at])
            contestants[at].seconds.append(sample_s)
    for contestant in contestants:
        contestant.seconds = _slowest(comm, mpi, contestant.seconds)
