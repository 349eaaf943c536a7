"""Hold the three allreduces against MPI's own, on sizes that do not divide evenly.

Run it: qsgd-hpc run -np 4 python check_sums.py
"""

import time

import numpy as np
from collectives import recursive_doubling, ring_allreduce, through_rank_0
from mpi4py import MPI


def seconds(reduce, array, comm, rounds=5):
    """Return the median time of the slowest rank."""
    taken = []
    for _ in range(rounds):
        copy = array.copy()
        comm.Barrier()
        start = time.perf_counter()
        reduce(copy, comm)
        taken.append(comm.allreduce(time.perf_counter() - start, op=MPI.MAX))
    return sorted(taken)[rounds // 2]


def main():
    comm = MPI.COMM_WORLD
    rng = np.random.default_rng(comm.Get_rank())
    for count in (1, 3, 1000, 262_147):
        array = rng.standard_normal(count)
        expected = np.empty_like(array)
        comm.Allreduce(array, expected)
        for reduce in (ring_allreduce, recursive_doubling, through_rank_0):
            ours = array.copy()
            reduce(ours, comm)
            right = comm.allreduce(np.allclose(ours, expected, rtol=1e-12), op=MPI.LAND)
            same = len(set(comm.allgather(ours.tobytes()))) == 1
            taken_s = seconds(reduce, array, comm)
            if comm.Get_rank() == 0:
                print(
                    f"{count:7} elements  {reduce.__name__:18}  equals MPI's: {right}"
                    f"  equal on all ranks: {same}  {1e6 * taken_s:.0f} us"
                )


if __name__ == "__main__":
    main()
