"""Train it on several ranks that send codes instead of gradients: training.png.

Run it: qsgd-hpc run -np 2 python train_digits_ranks.py
"""

import argparse

import matplotlib
import numpy as np
from digits import digits, loss_and_gradient
from mpi4py import MPI
from qsgd import dequantise, pack, quantise, unpack

matplotlib.use("agg")
import matplotlib.pyplot as plt

WAYS = (("fp32", 32), ("stochastic", 2), ("nearest", 2), ("nearest", 4))
LOOKS = (  # a wide pale line for the reference, so that those on top of it show
    {"color": "0.82", "linewidth": 6},
    {"color": "#0072B2"},
    {"color": "#D55E00"},
    {"color": "black", "linestyle": ":"},
)


def sum_over_ranks(gradient, bits, rounding, rng, comm):
    """Return the sum of what all ranks sent, and the bytes of one message."""
    if bits == 32:
        return comm.allreduce(gradient), gradient.nbytes
    message = pack(*quantise(gradient.ravel(), bits, rng, rounding=rounding), bits)
    summed = np.zeros(gradient.size, np.float32)
    for received in comm.allgather(message):  # in the order of ranks: equal sums on every rank
        summed += dequantise(*unpack(received, bits, summed.size), bits, summed.size)
    return summed.reshape(gradient.shape), len(message)


def share(y, by_class, comm):
    """Return which images are this rank's: every size-th one, or those of some digits."""
    rank, size = comm.Get_rank(), comm.Get_size()
    return np.flatnonzero(y * size // 10 == rank) if by_class else np.arange(rank, len(y), size)


def train(data, rounding, bits, by_class, steps, comm):
    """Return the loss over all images at each step, the test accuracy, and bytes per step."""
    x, y, x_test, y_test = data
    mine = share(y, by_class, comm)
    rng = np.random.default_rng(comm.Get_rank())  # other noise on each rank, or it would not cancel
    weights, losses = np.zeros((65, 10), np.float32), []
    for _ in range(steps + 1):
        loss, gradient = loss_and_gradient(weights, x[mine], y[mine], len(y))
        losses.append(comm.allreduce(loss))
        gradient, size_bytes = sum_over_ranks(gradient, bits, rounding, rng, comm)
        weights -= 0.5 * gradient
    return losses, np.mean((x_test @ weights).argmax(axis=1) == y_test), size_bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1500)
    steps = parser.parse_args().steps
    shown_at = steps // 15, steps // 3, steps
    columns = "  ".join(f"{at:6}" for at in shown_at)
    comm = MPI.COMM_WORLD
    data = digits()
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    for ax, by_class in zip(axes, (False, True), strict=True):
        title = "each rank has other digits" if by_class else "ranks have like images"
        if comm.Get_rank() == 0:
            print(f"{title}\ncode          loss at{columns}  accuracy  bytes/step")
        for (rounding, bits), look in zip(WAYS, LOOKS, strict=True):
            losses, accuracy, size_bytes = train(data, rounding, bits, by_class, steps, comm)
            name = "fp32" if bits == 32 else f"{bits} bit {rounding}"
            if comm.Get_rank() == 0:
                shown = "  ".join(f"{losses[at]:6.4f}" for at in shown_at)
                print(f"{name:20}  {shown}  {accuracy:10.1%}  {size_bytes:10}")
            ax.plot(losses, label=name, **look)
        ax.set(title=title, xlabel="step", yscale="log")
        ax.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
        ax.minorticks_off()
        ax.grid(color="0.9")
        ax.spines[["top", "right"]].set_visible(False)
    if comm.Get_rank() == 0:
        axes[0].set_ylabel("training loss")
        axes[0].legend(frameon=False)
        fig.savefig("training.png", dpi=110)


if __name__ == "__main__":
    main()
