"""Fit a linear map on all ranks, stop before the walltime, and go on in the next job.

qsgd-hpc submit --nodes 2 --walltime 8s --stop-before 3s --chain 4 train_resumable.py
"""

import argparse
import time
import zlib
from pathlib import Path

import numpy as np

import qsgd_hpc
import qsgd_hpc.arrays as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--pause", type=float, default=0.05, help="seconds that make a step longer")
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.npz"))
parser.add_argument("--stop-after", type=int, help="steps; as if the walltime came then")
args = parser.parse_args()


def save() -> None:
    """Write the checkpoint beside the old one, then put it into its place: one is always whole."""
    state = {"step": step, "weights": weights, "momentum": momentum}
    rounding = {f"rounding.{name}": count for name, count in hvd.rounding_state().items()}
    partial = args.checkpoint.with_suffix(".partial.npz")
    np.savez(partial, **state, **rounding)
    partial.replace(args.checkpoint)


hvd.init()
target = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
weights = np.zeros_like(target)
momentum = np.zeros_like(target)
step = 0
if args.checkpoint.exists():
    saved = np.load(args.checkpoint)
    step, weights, momentum = int(saved["step"]), saved["weights"], saved["momentum"]
    counts = {name: int(saved[name]) for name in saved if name.startswith("rounding.")}
    hvd.load_rounding_state({name.removeprefix("rounding."): n for name, n in counts.items()})
if hvd.rank() == 0:
    print(f"begins at step {step}", flush=True)
last = None if args.stop_after is None else step + args.stop_after

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
    if qsgd_hpc.should_stop() or step == last:  # on all ranks alike
        if hvd.rank() == 0:
            save()
            print(f"stops at step {step}", flush=True)
        qsgd_hpc.exit_for_resubmit()

if hvd.rank() == 0:
    loss, checksum = np.mean((weights - target) ** 2), zlib.crc32(weights.tobytes())
    print(f"ends at step {step} with loss {loss:.2e}, checksum {checksum}")
