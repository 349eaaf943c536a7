"""Three ways to sum an array over all ranks, in place, with nothing but messages between two."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

__all__ = ["recursive_doubling", "ring_allreduce", "through_rank_0"]

Watch = Callable[[str, int, np.ndarray], None]


def unwatched(phase: str, received: int, array: np.ndarray) -> None:
    """Do nothing after a step; `show_steps.py` prints here."""


def ring_allreduce(array: np.ndarray, comm: MPI.Comm, watch: Watch = unwatched) -> None:
    """Sum an array over the ranks; each rank talks to its two neighbours alone."""
    rank, size = comm.Get_rank(), comm.Get_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = np.array_split(array, size)  # views: to change a chunk is to change the array
    inbox = np.empty_like(chunks[0])  # no chunk is longer than the first

    # Reduce-scatter: a partial sum travels round the ring and grows by one rank at each stop.
    for step in range(size - 1):
        out, into = (rank - step) % size, (rank - step - 1) % size
        received = inbox[: chunks[into].size]
        comm.Sendrecv(chunks[out], right, recvbuf=received, source=left)
        chunks[into] += received
        watch("reduce-scatter", into, array)

    # Allgather: rank r now owns the whole sum of chunk r + 1, which travels round once more.
    for step in range(size - 1):
        out, into = (rank + 1 - step) % size, (rank - step) % size
        comm.Sendrecv(chunks[out], right, recvbuf=chunks[into], source=left)
        watch("allgather", into, array)


def recursive_doubling(array: np.ndarray, comm: MPI.Comm) -> None:
    """Sum an array over the ranks, a power of two of them; whole arrays change hands."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if size & (size - 1):
        raise ValueError(f"recursive doubling needs 1, 2, 4, 8, ... ranks, not {size}")
    inbox = np.empty_like(array)
    distance = 1
    while distance < size:
        peer = rank ^ distance  # flips one bit of the rank
        comm.Sendrecv(array, peer, recvbuf=inbox, source=peer)
        array += inbox
        distance *= 2


def through_rank_0(array: np.ndarray, comm: MPI.Comm) -> None:
    """Sum an array over the ranks the obvious way: all send to rank 0, which sends back."""
    if comm.Get_rank() == 0:
        inbox = np.empty_like(array)
        for source in range(1, comm.Get_size()):
            comm.Recv(inbox, source)
            array += inbox
        for target in range(1, comm.Get_size()):
            comm.Send(array, target)
    else:
        comm.Send(array, 0)
        comm.Recv(array, 0)
