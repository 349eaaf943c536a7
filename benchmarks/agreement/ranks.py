#!/usr/bin/env python3
"""Measure init and the agreement on 100 small tensors with real MPI ranks, each a node of its own.

    qsgd-hpc run -np 256 --ranks-per-node 1 benchmarks/agreement/ranks.py

Rank 0 prints the time of `init` after the start of MPI and a barrier, and for a step each rank's
processor time. Ranks on one machine share its cores: times of `init` are processor times of all.
"""

from __future__ import annotations

import os
import time

import numpy as np

from qsgd_hpc import arrays as hvd
from qsgd_hpc.runtime import mpi_binding

TENSORS = 100
ELEMENTS = 16
WARM_UP = 3
STEPS = 5


def step(tensors: list[np.ndarray]) -> None:
    """Sum all tensors over all ranks."""
    handles = [hvd.allreduce_async(x, name=f"x{i}") for i, x in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)


def main() -> None:
    """Print a table of this job's ranks."""
    before_mpi = time.perf_counter()
    world = mpi_binding.start_mpi().module.COMM_WORLD
    world.Barrier()
    after_mpi = time.perf_counter()
    hvd.init()
    world.Barrier()
    ready = time.perf_counter()
    tensors = [np.full(ELEMENTS, i, np.float32) for i in range(TENSORS)]
    for _ in range(WARM_UP):
        step(tensors)
    begin_cpu, begin = time.process_time(), time.perf_counter()
    for _ in range(STEPS):
        step(tensors)
    wall_ms = 1e3 * (time.perf_counter() - begin) / STEPS
    cpu_ms = 1e3 * (time.process_time() - begin_cpu) / STEPS
    ranks = np.asarray(hvd.allgather(np.array([cpu_ms], np.float64), name="cpu"))
    if hvd.rank() == 0:
        cores, size = os.cpu_count(), 4 * ELEMENTS
        print(f"{hvd.size()} ranks on {cores} cores, {TENSORS} tensors of {size} bytes")
        print(f"start of MPI and a barrier  {after_mpi - before_mpi:8.2f} s")
        print(f"init after that             {ready - after_mpi:8.2f} s")
        print(f"a step                      {wall_ms:8.1f} ms")
        others = np.median(ranks[1:])
        print(f"processor time of rank 0    {ranks[0]:8.1f} ms per step")
        print(f"of the median other rank    {others:8.1f} ms per step")
        print(f"ratio                       {ranks[0] / others:8.2f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
