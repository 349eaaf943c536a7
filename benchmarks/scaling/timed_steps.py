"""Steps that sleep instead of computing, so that all additional time is due to the network.

Emulated hosts share the cores of one machine, so computing slows down with their number; sleeping
does not. Twenty gradients, 4 Mi elements in total, are submitted 10 ms apart, after 100 ms.

    qsgd-hpc run -np 2 --network 200mbit benchmarks/scaling/timed_steps.py
"""

from __future__ import annotations

import argparse
import os
import time

import torch

import qsgd_hpc.torch as hvd
from qsgd_hpc.scaling import Meter

FORWARD_S = 0.1
BETWEEN_S = 0.01
ELEMENTS = [(1 + i % 4) * 83_886 for i in range(20)]


def step(gradients: list[torch.Tensor], compression: object) -> None:
    """Submit the gradients one after the other, then wait for all."""
    time.sleep(FORWARD_S)
    handles = []
    for i, gradient in enumerate(gradients):
        if i:
            time.sleep(BETWEEN_S)
        handles.append(hvd.allreduce_async_(gradient, name=f"g{i}", compression=compression))
    for handle in handles:
        hvd.synchronize(handle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=1, help="samples that a step counts as")
    parser.add_argument("--epochs", type=int, default=1)
    arguments = parser.parse_args()
    hvd.init()
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(n // 64, 64, generator=generator) for n in ELEMENTS]
    bits = int(os.environ.get("QSGD_BITS", "32"))
    compression = hvd.Compression.none if bits == 32 else hvd.Compression.qsgd(bits=bits)
    meter = Meter(hvd, global_batch_size=arguments.batch_size * hvd.size())
    for _ in range(arguments.epochs):
        for _ in meter.steps(range(arguments.steps)):
            step(gradients, compression)
        meter.epoch()
    meter.final()


if __name__ == "__main__":
    main()
