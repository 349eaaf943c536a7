"""Print which chunk of a tiny array moves where in a ring allreduce.

Run it: qsgd-hpc run -np 4 python show_steps.py
"""

import numpy as np
from collectives import ring_allreduce
from mpi4py import MPI


def cell(array, received=None):
    """Return an array's numbers, the one just received in brackets."""
    return "".join(
        f"[{value}]".rjust(6) if i == received else f"{value} ".rjust(6)
        for i, value in enumerate(array)
    )


def main():
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    array = np.full(size, 10**rank)  # a digit for each rank: 101 holds ranks 0 and 2
    rows = [("start", cell(array))]
    ring_allreduce(array, comm, lambda phase, into, now: rows.append((phase, cell(now, into))))

    # All rows go to rank 0, for lines of several ranks would come in any order.
    table = comm.gather(rows)
    if rank == 0:
        print(" " * 14 + " |".join(f"rank {r}".center(6 * size) for r in range(size)).rstrip())
        for row in zip(*table, strict=True):
            print(f"{row[0][0]:14}" + " |".join(text for _, text in row).rstrip())


if __name__ == "__main__":
    main()
