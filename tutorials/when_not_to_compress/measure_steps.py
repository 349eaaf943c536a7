"""Time three kinds of training step with fp32, 8 and 4 bits, which take turns.

Run it: qsgd-hpc run -np 2 python measure_steps.py --turns 30
"""

import argparse
import time

import numpy as np

import qsgd_hpc.arrays as hvd

KINDS = {  # shape of the gradient, matrix products that stand for the backward pass
    "small model": ((100, 200), 5),
    "large gradient": ((2048, 2048), 5),
    "compute-bound": ((100, 2000), 100),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=30, help="steps of each kind and code")
    turns = parser.parse_args().turns
    hvd.init()
    matrix = np.random.default_rng(hvd.rank()).standard_normal((256, 256)).astype(np.float32)
    compressions = {
        "fp32": hvd.Compression.none,
        "8 bit": hvd.Compression.qsgd(bits=8),
        "4 bit": hvd.Compression.qsgd(bits=4),
    }
    if hvd.rank() == 0:
        print("                gradient  computing       fp32      8 bit      4 bit   a step, ms")
    for kind, (shape, products) in KINDS.items():
        gradient = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        computing, steps = [], {bits: [] for bits in compressions}
        for _ in range(turns):
            for bits, compression in compressions.items():
                hvd.barrier()
                start = time.perf_counter()
                for _ in range(products):
                    matrix @ matrix
                computing.append(time.perf_counter() - start)
                hvd.allreduce(gradient, f"{kind} {bits}", compression=compression)
                steps[bits].append(time.perf_counter() - start)
        # The least of the turns: what else the machine has to do can only add to a step.
        least_ms = [1e3 * min(times) for times in (computing, *steps.values())]
        if hvd.rank() == 0:
            shown = " ".join(f"{ms:10.2f}" for ms in least_ms)
            print(f"{kind:14}  {gradient.nbytes / 1e6:5.2f} MB {shown}")


if __name__ == "__main__":
    main()
