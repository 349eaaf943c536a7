#!/usr/bin/env python3
"""Train one network in several ways in turn, and print the cost of each exchange of gradients.

    qsgd-hpc run -np 2 benchmarks/end_to_end_torch/train.py --task resnet
    qsgd-hpc run -np 4 --network 1gbit \
        benchmarks/end_to_end_torch/train.py --task lstm --data data/ptb --batch 8

All contestants run in the same processes and take turns of a few steps, so that disturbances of the
machine affect all equally. A step's time is the slowest rank's mean over the steps of a turn; the
table has medians over turns.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from contestants import Contestant, assemble
from report import describe, summarise
from tasks import Task, bucket, mnist, ptb, resnet

import qsgd_hpc.torch as hvd
from qsgd_hpc.bench.contestants import start_gloo

BATCH = {"resnet": 4, "lstm": 8, "mnist": 64, "bucket": 1}


def take_turn(contestant: Contestant, task: Task, steps: int) -> None:
    """Run some steps after a barrier, and record the time of one."""
    batches = [task.batch(contestant.steps + i) for i in range(steps)]
    # gloo's barrier sleeps: a waiting rank must not use the core of a computing one.
    dist.barrier()
    sent_before = hvd.communication_stats()["wire_bytes"]
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    for batch in batches:
        contestant.step(task, batch)
    contestant.seconds.append((time.perf_counter() - begin_s) / steps)
    contestant.cpu_seconds.append((time.process_time() - begin_cpu_s) / steps)
    if contestant.is_ours:
        sent = hvd.communication_stats()["wire_bytes"] - sent_before
        contestant.wire_bytes = sent / steps


def compete(contestants: list[Contestant], task: Task, args: argparse.Namespace) -> None:
    """Run turns of all contestants until the time is over, at least three after a warm-up."""
    begin_s = time.perf_counter()
    turn = 0
    continues = True
    while continues:
        for i in range(len(contestants)):
            take_turn(contestants[(i + turn) % len(contestants)], task, args.steps)
        turn += 1
        late = time.perf_counter() - begin_s > args.seconds
        continues = hvd.broadcast_object(turn < args.least_turns or not late)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=tuple(BATCH), default="resnet")
    parser.add_argument("--data", type=Path, help="folder of the task; default: random data")
    parser.add_argument("--batch", type=int, help="images or sequences per rank (4, 8 or 64)")
    parser.add_argument("--width", type=int, default=32, help="of ResNet-34; 64 in the paper")
    parser.add_argument("--hidden", type=int, default=650, help="size of the LSTM")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn (default 2)")
    parser.add_argument("--seconds", type=float, default=60, help="for all (default 60)")
    parser.add_argument("--least-turns", type=int, default=4, metavar="N", help="(default 4)")
    parser.add_argument("--only", action="append", default=[], metavar="WHAT", help="repeatable")
    parser.add_argument("--where", default="", help="description of the network, for the record")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the samples, too")
    args = parser.parse_args()
    args.batch = args.batch or BATCH[args.task]
    return args


def main() -> None:
    """Run all contestants, and print the result on rank 0."""
    args = parse_args()
    torch.set_num_threads(1)
    hvd.init()
    from mpi4py import MPI

    fault = start_gloo(MPI.COMM_WORLD, dist)
    if fault:
        raise SystemExit(f"train.py: gloo does not start: {fault}")
    place = {"rank": hvd.rank(), "ranks": hvd.size(), "batch": args.batch}
    if args.task == "resnet":
        task = resnet(args.data, **place, width=args.width)
    elif args.task == "mnist":
        task = mnist(args.data, **place)
    elif args.task == "bucket":
        task = bucket(rank=hvd.rank())
    else:
        task = ptb(args.data, **place, hidden=args.hidden)
    contestants = assemble(task, args.only)
    compete(contestants, task, args)
    record = summarise(contestants, task, where=args.where, batch=args.batch)
    if hvd.rank() == 0:
        print(describe(record), flush=True)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
