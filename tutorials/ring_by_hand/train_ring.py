"""The same fit on several ranks, each with its share of the samples.

Run it: qsgd-hpc run -np 4 python train_ring.py
"""

import numpy as np
from collectives import ring_allreduce
from mpi4py import MPI
from train import samples


def main():
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    x, y = samples()
    total = len(y)
    x, y = x[rank::size], y[rank::size]
    weights = np.zeros(x.shape[1])
    for step in range(41):
        residual = x @ weights - y
        gradient = 2 * x.T @ residual / total
        message = np.append(gradient, residual @ residual / total)
        ring_allreduce(message, comm)
        gradient, loss = message[:-1], message[-1]
        if step % 10 == 0 and rank == 0:
            print(f"step {step:2}  loss {loss:.6f}")
        weights -= 0.1 * gradient
    if rank == 0:
        print("weights", np.round(weights, 4))
    everywhere = comm.gather(weights.tobytes())
    if rank == 0:
        print("equal to the last bit on all ranks:", len(set(everywhere)) == 1)


if __name__ == "__main__":
    main()
