"""Fit a linear map on all ranks of a job; a job that is ended early leaves nothing.

qsgd-hpc submit --nodes 2 train.py --steps 200
"""

import argparse
import time
import zlib

import numpy as np

import qsgd_hpc.arrays as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--pause", type=float, default=0.05, help="seconds that make a step longer")
args = parser.parse_args()

hvd.init()
target = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
weights = np.zeros_like(target)
momentum = np.zeros_like(target)
step = 0
if hvd.rank() == 0:
    print(f"begins at step {step}", flush=True)

while step < args.steps:
    draw = np.random.default_rng((step, hvd.rank()))
    x = draw.normal(size=(16, 64)).astype(np.float32)
    error = x @ (weights - target)
    gradient = x.T @ error / len(x)
    hvd.allreduce_(gradient, "weights", compression=hvd.Compression.qsgd(bits=4))
    momentum = 0.9 * momentum + gradient
    weights = weights - 0.02 * momentum
    time.sleep(args.pause)
    step += 1

if hvd.rank() == 0:
    loss, checksum = np.mean((weights - target) ** 2), zlib.crc32(weights.tobytes())
    print(f"ends at step {step} with loss {loss:.2e}, checksum {checksum}")
