"""Hold the package's 8, 4 and 2 bits against ours: error of a code, of a sum, and bytes.

Run it: qsgd-hpc run -np 2 python through_package.py
"""

import numpy as np
from mpi4py import MPI
from qsgd import dequantise, pack, quantise, unpack, variance

import qsgd_hpc.arrays as hvd


def sra(array, bits, rng, comm):
    """Sum over ranks by scatter-reduce-allgather; return the sum and the bytes sent per rank."""
    rank, size = comm.Get_rank(), comm.Get_size()
    chunks = np.array_split(array, size)

    def code(chunk):
        return pack(*quantise(chunk, bits, rng), bits)

    def decode(message, count):
        return dequantise(*unpack(message, bits, count), bits, count)

    to_owners = [b"" if r == rank else code(chunk) for r, chunk in enumerate(chunks)]
    own = chunks[rank].copy()
    for message in comm.alltoall(to_owners):
        if message:
            own += decode(message, own.size)
    result = code(own)  # the owner, too, goes on with what the others decode
    whole = [decode(m, c.size) for m, c in zip(comm.allgather(result), chunks, strict=True)]
    sent = sum(map(len, to_owners)) + (size - 1) * len(result)
    return np.concatenate(whole), sent


def main():
    hvd.init()
    comm = MPI.COMM_WORLD
    rng = np.random.default_rng(hvd.rank())
    gradient = rng.standard_normal((256, 1024)).astype(np.float32)
    exact = hvd.allreduce(gradient, "exact", op=hvd.Sum)
    if hvd.rank() == 0:
        print("       w of one code       error of the sum     bytes sent")
        print("bits   ours      package   ours      package    ours     package")
    for bits in (8, 4, 2):
        before = hvd.communication_stats()["wire_bytes"]
        # Without feedback: what a code loses in this step, and nothing owed from earlier ones.
        qsgd = hvd.Compression.qsgd(bits=bits, error_feedback=False)
        theirs = hvd.allreduce(gradient, f"{bits} bit", op=hvd.Sum, compression=qsgd)
        their_bytes = hvd.communication_stats()["wire_bytes"] - before
        ours, our_bytes = sra(gradient.ravel(), bits, rng, comm)
        w = variance(gradient.ravel(), bits) / np.sum(gradient**2)
        their_w = hvd.compression_stats()[f"{bits} bit"]["nmse"]
        lost, their_lost = (
            np.sum((x.ravel() - exact.ravel()) ** 2) / np.sum(exact**2) for x in (ours, theirs)
        )
        if hvd.rank() == 0:
            print(
                f"{bits:4}   {w:.2e}  {their_w:.2e}  {lost:.2e}  {their_lost:.2e}"
                f"   {our_bytes:7}  {their_bytes:7}"
            )


if __name__ == "__main__":
    main()
