#!/usr/bin/env python3
"""Train entrants until their validation loss is the base's, or time their steps on a network.

    qsgd-hpc run -np 2 benchmarks/race/train.py --track ptb --data data --json race-ptb.json
    qsgd-hpc run -np 2 --network 1gbit benchmarks/race/train.py --track ptb --times 1gbit ...

run.py does both. Results in the record are not measured again: an interrupted run can be resumed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from entrants import BASE, ENTRANTS, Contestant
from report import reached, target
from tracks import TRACKS, Track

import qsgd_hpc
import qsgd_hpc.torch as hvd
from qsgd_hpc.bench.contestants import start_gloo

SCHEMA = 1
MOST = 1.5  # an entrant has at most this many times the base's steps to reach the target
EVERY = 10  # steps from one validation to the next
TURNS, TURN_STEPS = 12, 5  # the first turn warms up


def begin(track: Track, what: str, seed: int) -> Contestant:
    """Restart the engine, and return an entrant with a seed's initial weights."""
    hvd.shutdown()
    hvd.init()
    torch.manual_seed(seed)
    model = track.task.build()
    return ENTRANTS[what](what, model, track.optimizer(model.parameters()))


def race(track: Track, what: str, seed: int, goal: float | None) -> dict[str, Any]:
    """Train one entrant; return its validation losses."""
    entrant = begin(track, what, seed)
    losses: list[float] = []
    row = {"what": what, "seed": seed, "every": EVERY, "losses": losses}
    for step in range(1, round(MOST * track.steps) + 1):
        entrant.step(track.task, track.batch(seed, step, hvd.rank()))
        if step % EVERY:
            continue
        losses.append(round(hvd.allreduce(track.examine(entrant.model)).item(), 5))
        if goal is not None and step >= track.steps and reached(row, goal):
            break
    return row


def time_steps(track: Track) -> dict[str, list[float]]:
    """Run all entrants in turn; return the slowest rank's seconds of a step for each turn."""
    hvd.shutdown()
    hvd.init()
    entrants = []
    for what, make in ENTRANTS.items():
        model = track.task.build()
        entrants.append(make(what, model, track.optimizer(model.parameters())))
    for turn in range(TURNS):
        for i in range(len(entrants)):
            entrant = entrants[(i + turn) % len(entrants)]
            batches = [track.batch(turn, step, hvd.rank()) for step in range(TURN_STEPS)]
            dist.barrier()
            begin_s = time.perf_counter()
            for batch in batches:
                entrant.step(track.task, batch)
            entrant.seconds.append((time.perf_counter() - begin_s) / TURN_STEPS)
    taken = {}
    for entrant in entrants:
        slowest = hvd.allreduce(torch.tensor(entrant.seconds[1:]), op=hvd.Max)
        taken[entrant.what] = [round(s, 6) for s in slowest.tolist()]
    return taken


def describe(track: Track, args: argparse.Namespace) -> dict[str, Any]:
    """Return the record of a race without results."""
    return {
        "schema": SCHEMA,
        "version": qsgd_hpc.__version__,
        "date": datetime.date.today().isoformat(),
        "mpi": hvd.mpi_library_version().partition("\n")[0].strip("\0"),
        "torch": torch.__version__,
        "ranks": hvd.size(),
        "track": args.track,
        "task": track.task.title,
        "data": args.data is not None,
        "parameters": sum(p.numel() for p in track.task.build().parameters()),
        "steps": track.steps,
        "rows": [],
        "times_s": {},
    }


def resume(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the record of an earlier run, or the given empty one."""
    if not path.exists():
        return record
    kept: dict[str, Any] = json.loads(path.read_text())
    for what in ("schema", "ranks", "task", "data", "parameters", "steps"):
        if kept[what] != record[what]:
            raise SystemExit(f"{path} is of a race with {what} {kept[what]}, not {record[what]}")
    return kept


def keep(record: dict[str, Any], path: Path) -> None:
    """Write the record atomically."""
    if hvd.rank() != 0:
        return
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record) + "\n")
    part.rename(path)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--track", choices=TRACKS, required=True)
    parser.add_argument("--data", type=Path, help="has shakespeare and ptb; default: random data")
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="the record")
    parser.add_argument("--times", metavar="NETWORK", help="only time steps on it")
    parser.add_argument("--seeds", type=int, default=10, help="(default 10)")
    parser.add_argument("--steps", type=int, help="of the base (default: the track's)")
    parser.add_argument("--only", action="append", default=[], metavar="WHAT", help="repeatable")
    return parser.parse_args()


def main() -> None:
    """Train or time, and write each result immediately."""
    args = parse_args()
    torch.set_num_threads(1)
    hvd.init()
    from mpi4py import MPI

    fault = start_gloo(MPI.COMM_WORLD, dist)
    if fault:
        raise SystemExit(f"train.py: gloo does not start: {fault}")
    place = {"rank": hvd.rank(), "ranks": hvd.size()}
    track = TRACKS[args.track](args.data, **place, steps=args.steps)
    record = hvd.broadcast_object(resume(describe(track, args), args.json))
    if args.times:
        if args.times not in record["times_s"]:
            record["times_s"][args.times] = time_steps(track)
            keep(record, args.json)
    else:
        done = {(row["what"], row["seed"]) for row in record["rows"]}
        # The base is first, with all seeds, because it determines the target.
        for what in [BASE, *(w for w in ENTRANTS if w != BASE and w in (args.only or ENTRANTS))]:
            goal = None if what == BASE else target(record)
            for seed in range(args.seeds):
                if (what, seed) in done:
                    continue
                record["rows"].append(race(track, what, seed, goal))
                keep(record, args.json)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
