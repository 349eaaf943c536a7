#!/usr/bin/env python3
"""Train one network in several ways in turn, and print the cost of each exchange of gradients.

    qsgd-hpc run -np 2 python benchmarks/end_to_end_tensorflow/train.py --batch 32

All contestants run in the same processes and take turns of a few steps, so that disturbances of the
machine affect all equally; in the turns of the single process the other ranks sleep. A step's time
is the slowest rank's mean over the steps of a turn; the table has medians over turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from contestants import ALONE, Contestant, assemble, start_strategy

import qsgd_hpc.tensorflow as hvd
from qsgd_hpc import __version__


def rest(comm: Any) -> None:
    """Wait for all ranks, sleeping: a waiting rank must not use the core of a computing one."""
    waiting = comm.Ibarrier()
    while not waiting.Test():
        time.sleep(0.001)


def take_turn(contestant: Contestant, comm: Any, steps: int, batch: int) -> None:
    """Run some steps after a barrier, and record the time of one."""
    rng = np.random.default_rng(hvd.rank())
    images = tf.constant(rng.standard_normal((batch, 28, 28, 1)), tf.float32)
    labels = tf.constant(rng.integers(0, 10, batch))
    rest(comm)
    if contestant.what != ALONE or hvd.rank() == 0:
        sent_before = hvd.communication_stats()["wire_bytes"]
        begin_s = time.perf_counter()
        for _ in range(steps):
            contestant.step(images, labels).numpy()
        contestant.seconds.append((time.perf_counter() - begin_s) / steps)
        sent = hvd.communication_stats()["wire_bytes"] - sent_before
        contestant.wire_bytes = sent / steps
    rest(comm)


def summarise(contestants: list[Contestant], args: argparse.Namespace) -> dict[str, Any]:
    """Return the record, equal on all ranks, without the warm-up turn; collective."""
    rows = []
    for each in contestants:
        turns = [s for s in hvd.allgather_object(each.seconds[1:]) if s]
        slowest = [max(seconds) for seconds in zip(*turns, strict=True)]
        median_s = statistics.median(slowest)
        ranks = 1 if each.what == ALONE else hvd.size()
        rows.append(
            {
                "what": each.what,
                "ranks": ranks,
                "median_s": median_s,
                "images_per_s": ranks * args.batch / median_s,
                "wire_bytes": each.wire_bytes,
                "samples_s": [round(s, 6) for s in slowest],
            }
        )
    return {
        "schema": 1,
        "version": __version__,
        "tensorflow": tf.__version__,
        "mpi": hvd.mpi_library_version().partition("\n")[0].strip("\0"),
        "ranks": hvd.size(),
        "batch": args.batch,
        "rows": rows,
    }


def describe(record: dict[str, Any]) -> str:
    """Return the table."""
    lines = [
        f"MNIST's network, 1.2 million parameters, batch {record['batch']} a rank, "
        f"TensorFlow {record['tensorflow']}, {record['mpi']}",
        f"{'':22}{'ranks':>6}{'step ms':>10}{'images/s':>10}{'sent MB':>9}",
    ]
    for row in record["rows"]:
        lines.append(
            f"{row['what']:22}{row['ranks']:6}{row['median_s'] * 1e3:10.2f}"
            f"{row['images_per_s']:10.0f}{row['wire_bytes'] / 1e6:9.3f}"
        )
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=32, help="images per rank (default 32)")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn (default 5)")
    parser.add_argument("--turns", type=int, default=11, help="of each, one for warm-up (11)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the samples, too")
    return parser.parse_args()


def main() -> None:
    """Run all contestants, and print the result on rank 0."""
    args = parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    from mpi4py import MPI

    contestants = assemble(start_strategy())
    for turn in range(args.turns):
        for i in range(len(contestants)):
            contestant = contestants[(i + turn) % len(contestants)]
            take_turn(contestant, MPI.COMM_WORLD, args.steps, args.batch)
    record = summarise(contestants, args)
    if hvd.rank() == 0:
        print(describe(record), flush=True)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
