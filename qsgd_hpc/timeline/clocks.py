"""A common time axis for the ranks of a job, because hosts' clocks have different origins."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

__all__ = ["zero_s"]

_TAG = 77  # the engine's messages on this communicator have tags 1 to 4
_ROUNDS = 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def zero_s(comm: Any) -> float:
    """Return the time origin of the job on this rank's ``time.monotonic()``; collective.

    Exact on rank 0's host, whose ranks share a clock. For each other rank, rank 0 requests its time
    20 times and uses the fastest answer, whose error is at most half of its round trip: a few
    microseconds on a cluster's network.

    Args:
        comm: mpi4py communicator; the engine may use it at the same time.
    Returns:
        the origin, in seconds of this rank's monotonic clock.
    Source: Cristian, Probabilistic clock synchronization, Distributed Computing 3, 1989.
    """
    host = _BOOT_ID.read_text() if _BOOT_ID.exists() else str(comm.Get_rank())
    hosts = comm.allgather(host)
    zero: float = comm.bcast(time.monotonic())
    remote = [rank for rank, other in enumerate(hosts) if other != hosts[0]]
    if comm.Get_rank() == 0:
        for rank in remote:
            comm.send(_offset_s(comm, rank), rank, _TAG)
    elif comm.Get_rank() in remote:
        for _ in range(_ROUNDS):
            comm.recv(source=0, tag=_TAG)
            comm.send(time.monotonic(), 0, _TAG)
        zero += comm.recv(source=0, tag=_TAG)
    return zero


def _offset_s(comm: Any, rank: int) -> float:
    """Return the seconds by which the clock of ``rank`` is ahead of this rank's."""
    answers = []
    for _ in range(_ROUNDS):
        sent = time.monotonic()
        comm.send(None, rank, _TAG)
        theirs = comm.recv(source=rank, tag=_TAG)
        received = time.monotonic()
        answers.append((received - sent, theirs - (sent + received) / 2))
    return float(min(answers)[1])
