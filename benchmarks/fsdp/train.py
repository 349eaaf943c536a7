#!/usr/bin/env python3
"""Train a small transformer under FSDP2 with coded gradients and weights, and with float32.

    qsgd-hpc run -np 2 benchmarks/fsdp/train.py --data data/shakespeare/input.txt
    qsgd-hpc run -np 2 --network 1gbit benchmarks/fsdp/train.py --data ... --steps 20

All contestants start with the same weights, use the same batches and take turns of a few steps in
the same processes, so that disturbances of the machine affect all equally.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Text, Transformer
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import qsgd_hpc
import qsgd_hpc.torch as hvd
from qsgd_hpc.bench.contestants import start_gloo
from qsgd_hpc.torch.fsdp import QuantizedShards, quantize_fsdp

SCHEMA = 1
PLAIN = "float32"
HALF = "bfloat16"
BITS: dict[str, tuple[int | None, int | None]] = {
    PLAIN: (None, None),
    HALF: (None, None),
    "weights 8 bit": (None, 8),
    "gradients 8, weights 8 bit": (8, 8),
    "gradients 4 bit": (4, None),
    "gradients 4, weights 8 bit": (4, 8),
    "gradients 4, weights 4 bit": (4, 4),
}
TURN = 5  # steps
LAST_LOSSES = 20  # steps whose mean is the final loss
EXAMINED = 256  # pieces of the validation text


@dataclass
class Contestant:
    """A sharded model in training, and its optimizer."""

    what: str
    model: nn.Module
    shards: QuantizedShards
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    """Means over all ranks."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of a step on the slowest rank, one value per turn."""


def sharded(what: str, text: Text, args: argparse.Namespace) -> Contestant:
    """Build a contestant, from the same weights as all others."""
    torch.manual_seed(1)
    model = Transformer(text.characters, args.width, args.layers, args.heads, args.context)
    half = torch.bfloat16 if what == HALF else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    shards = quantize_fsdp(model, *BITS[what])  # without bits, it only counts bytes
    return Contestant(what, model, shards, torch.optim.AdamW(model.parameters(), lr=args.rate))


def mean_over_ranks(values: list[float], op: Any = dist.ReduceOp.SUM) -> list[float]:
    """Return the mean, or with MAX the largest, of each value."""
    numbers = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(numbers, op=op)
    divisor = 1 if op == dist.ReduceOp.MAX else dist.get_world_size()
    return (numbers / divisor).tolist()


def take_turn(contestant: Contestant, text: Text, args: argparse.Namespace, steps: range) -> None:
    """Train for some steps and record their time."""
    batches = [
        text.batch(args.batch, args.context, seed=step * hvd.size() + hvd.rank()) for step in steps
    ]
    losses = []
    dist.barrier()
    began = time.perf_counter()
    for x, y in batches:
        contestant.optimizer.zero_grad()
        loss = F.cross_entropy(contestant.model(x).float(), y)
        loss.backward()
        contestant.optimizer.step()
        losses.append(loss.item())
    took = (time.perf_counter() - began) / len(steps)
    contestant.losses += mean_over_ranks(losses)
    contestant.seconds += mean_over_ranks([took], dist.ReduceOp.MAX)


def validation_loss(contestant: Contestant, text: Text, context: int) -> float:
    """Return the loss on the validation text, with the weights as used in training."""
    x, y = text.examination(EXAMINED, context)
    parts = []
    with torch.no_grad():
        for rows, follow in zip(x.chunk(8), y.chunk(8), strict=True):
            parts.append(F.cross_entropy(contestant.model(rows).float(), follow).item())
    return mean_over_ranks([statistics.mean(parts)])[0]


def row(contestant: Contestant, text: Text, args: argparse.Namespace) -> dict[str, Any]:
    """Return the results of a contestant, equal on all ranks."""
    sent = {kind: n / args.steps for kind, n in contestant.shards.traffic().items()}
    return {
        "what": contestant.what,
        "validation_loss": validation_loss(contestant, text, args.context),
        "loss": statistics.mean(contestant.losses[-LAST_LOSSES:]),
        "losses": [round(loss, 4) for loss in contestant.losses],
        "median_s": statistics.median(contestant.seconds[1:] or contestant.seconds),
        "gradient_bytes": sent["gradients"],
        "weight_bytes": sent["weights"],
    }


def describe(record: dict[str, Any]) -> str:
    """Return the record as a table in Markdown."""
    rows = record["rows"]
    plain = next(r for r in rows if r["what"] == PLAIN)
    whole = plain["gradient_bytes"] + plain["weight_bytes"]
    lines = [
        f"{record['task']}: {record['parameters']:,} parameters, {record['steps']} steps of "
        f"{record['batch']} pieces on each of {record['ranks']} ranks, {record['where']}:",
        "",
        "| | validation loss | training loss | KB of gradients | weights | of float32 | step, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        share = (r["gradient_bytes"] + r["weight_bytes"]) / whole
        lines.append(
            f"| {r['what']} | {r['validation_loss']:.3f} | {r['loss']:.3f} | "
            f"{r['gradient_bytes'] / 1e3:,.0f} | {r['weight_bytes'] / 1e3:,.0f} | {share:.1%} | "
            f"{r['median_s'] * 1e3:.0f} |"
        )
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="a text; default: random characters")
    parser.add_argument("--steps", type=int, default=600, help="of each (default 600)")
    parser.add_argument("--batch", type=int, default=12, help="pieces per rank (default 12)")
    parser.add_argument("--context", type=int, default=96, help="characters (default 96)")
    parser.add_argument("--width", type=int, default=128, help="of the network (default 128)")
    parser.add_argument("--layers", type=int, default=4, help="(default 4)")
    parser.add_argument("--heads", type=int, default=4, help="(default 4)")
    parser.add_argument("--rate", type=float, default=1e-3, help="of AdamW (default 0.001)")
    parser.add_argument("--only", action="append", choices=tuple(BITS), help="repeatable")
    parser.add_argument("--where", default="in shared memory", help="for the record")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the losses, too")
    return parser.parse_args()


def main() -> None:
    """Train all, and print the result on rank 0."""
    args = parse_args()
    torch.set_num_threads(1)
    hvd.init()
    from mpi4py import MPI

    if fault := start_gloo(MPI.COMM_WORLD, dist):
        raise SystemExit(f"train.py: gloo does not start: {fault}")
    text = Text.read(args.data)
    wanted = [what for what in BITS if what == PLAIN or not args.only or what in args.only]
    contestants = [sharded(what, text, args) for what in wanted]
    for begin in range(0, args.steps, TURN):
        steps = range(begin, min(begin + TURN, args.steps))
        for i in range(len(contestants)):
            take_turn(contestants[(i + begin // TURN) % len(contestants)], text, args, steps)
        if hvd.rank() == 0 and begin % 100 < TURN:
            losses = ", ".join(f"{c.losses[-1]:.2f}" for c in contestants)
            print(f"step {steps.stop}: {losses}", flush=True)
    record = {
        "schema": SCHEMA,
        "version": qsgd_hpc.__version__,
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "where": args.where,
        "ranks": hvd.size(),
        "task": f"transformer {args.layers} x {args.width}, {text.title}",
        "batch": args.batch,
        "steps": args.steps,
        "parameters": sum(p.numel() for p in contestants[0].model.parameters()),
        "rows": [row(contestant, text, args) for contestant in contestants],
    }
    if hvd.rank() == 0:
        print(describe(record), flush=True)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
