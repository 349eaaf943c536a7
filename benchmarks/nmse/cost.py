#!/usr/bin/env python
"""Measure the cost of computing the error of every code, as a share of a training step.

    qsgd-hpc run -np 2 benchmarks/nmse/cost.py                  # nothing else running
    qsgd-hpc run -np 2 benchmarks/nmse/cost.py --json cost.json

Reduces the gradients of a network with and without the measurement in turn, and trains the same
network by DistributedOptimizer, which always measures. Shared memory is the worst case, because no
transfer hides the difference.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "end_to_end_torch"))

import tasks  # noqa: E402

import qsgd_hpc.torch as hvd  # noqa: E402
from qsgd_hpc import _core  # noqa: E402
from qsgd_hpc.runtime import direct  # noqa: E402


def seconds_of(call: Callable[[], object]) -> float:
    """Return the time that one call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def reductions_s(model: torch.nn.Module, spec: _core.CodecSpec, repeats: int) -> dict[bool, float]:
    """Return the slowest rank's median time of a reduction with, and without, the measurement."""
    from mpi4py import MPI  # after init() has initialised it

    rng = np.random.default_rng(hvd.rank())
    arrays = [
        rng.standard_normal(p.numel()).astype(np.float32)
        for p in model.parameters()
        if hvd.Compression.qsgd().coding_for_gradient("", p.shape, "float32") is not None
    ]
    samples: dict[bool, list[float]] = {True: [], False: []}
    with direct.communicator() as communicator:
        calls = {
            judged: communicator.prepare(arrays, op="average", coding=spec, judged=judged)
            for judged in samples
        }
        for turn in range(repeats + 2):
            for judged, call in calls.items():
                communicator.barrier()
                s = seconds_of(call)
                if turn > 1:  # after the warm-up
                    samples[judged].append(communicator.comm.allreduce(s, MPI.MAX))
    return {judged: statistics.median(found) for judged, found in samples.items()}


def step_s(task: tasks.Task, model: torch.nn.Module, bits: int, repeats: int) -> float:
    """Return the median time of a training step."""
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=task.rate or 1e-3),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.qsgd(bits=bits),
    )

    def step(number: int) -> None:
        optimizer.zero_grad()
        task.loss(model, task.batch(number)).backward()
        optimizer.step()

    samples = [seconds_of(lambda n=n: step(n)) for n in range(repeats + 2)]
    return statistics.median(samples[2:])


def all_tasks() -> list[tasks.Task]:
    """Return a network with much computation per byte, two with little, and one with none."""
    place = {"rank": hvd.rank(), "ranks": hvd.size()}
    return [
        tasks.resnet(None, **place, batch=4, width=64),
        tasks.resnet(None, **place, batch=4, width=8),
        tasks.ptb(None, **place, batch=4, hidden=200),
        tasks.bucket(rank=hvd.rank()),
    ]


@click.command()
@click.option("--bits", default="8,4", show_default=True, help="Bits per element.")
@click.option("--repeats", default=40, show_default=True, help="Timed calls of each kind.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the measurements.")
def main(bits: str, repeats: int, path: Path | None) -> None:
    """Measure, and print the table on rank 0."""
    hvd.init()
    torch.set_num_threads(1)
    rows = []
    for task in all_tasks():
        for width in map(int, bits.split(",")):
            torch.manual_seed(1)
            model = task.build()
            found = reductions_s(model, _core.CodecSpec(bits=width), repeats)
            rows.append(
                {
                    "what": task.title,
                    "bits": width,
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "without_s": found[False],
                    "with_s": found[True],
                    "step_s": step_s(task, model, width, max(5, repeats // 4)),
                }
            )
    if hvd.rank() != 0:
        return
    print("| gradients of | bits | reduction without | with | step | share of the step |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        times = " | ".join(
            f"{row[name] * 1e3:.2f} ms" for name in ("without_s", "with_s", "step_s")
        )
        share = (row["with_s"] - row["without_s"]) / row["step_s"]
        print(f"| {row['what']} | {row['bits']} | {times} | {share:.2%} |")
    if path is not None:
        record = {"schema": 1, "ranks": hvd.size(), "torch": torch.__version__, "rows": rows}
        path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
