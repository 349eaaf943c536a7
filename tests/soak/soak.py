"""Random collectives on every rank for a long time: right, equal everywhere, no leak and no hang.

    qsgd-hpc run -np 4 python tests/soak/soak.py --seconds 1800

A round submits up to a dozen operations of random kinds, shapes, types and process sets, on each
rank in an order of its own; then every rank checks each result, and all compare what must be equal
on all. Now and then sets come and go, and ranks join early. `--seed` repeats a run.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import random
import sys
import time
import zlib
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from operations import REDUCING, Operation, draw

import qsgd_hpc.torch as hvd

HANG_S = 120  # without the end of a round
MOST_SETS = 4
WARM_UP = 0.5  # of the time: caches, arenas and pools have their size then
SAMPLES = 40  # of the memory held, in the time after that
MOST_GROWTH_BYTES = 8 << 20
LEAST_ROUNDS = 100  # to judge memory: before, the allocators' arenas still grow
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Return the memory that this process holds, without what its allocator merely keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor of any type and layout."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Soak:
    """The rounds of one run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rank, self.size = hvd.rank(), hvd.size()
        self.sets = [hvd.global_process_set]
        self.counts: Counter[str] = Counter()
        self.own = random.Random(f"{seed} {self.rank} own")  # orders and delays

    def round(self, number: int) -> None:
        """Run one round; raises AssertionError for a wrong result."""
        chance = random.Random(f"{self.seed} {number} plan")
        if chance.random() < 0.1:
            self.change_sets(chance)
        if chance.random() < 0.05:
            self.join(f"{self.seed} {number} join", chance)
        plan = draw(f"{self.seed} {number}", self.sets)
        mine = [o for o in plan if self.rank in o.members]
        self.own.shuffle(mine)
        started = []
        for operation in mine:
            if self.own.random() < 0.05:
                time.sleep(self.own.random() * 0.02)
            started.append((operation, operation.start(self.rank)))
        self.own.shuffle(started)
        results = {o.name: self.check(o, self.result(o, handle)) for o, handle in started}
        self.compare(plan, results)
        self.counts.update(o.kind for o in plan)

    def result(self, operation: Operation, handle: Any) -> Any:
        """Wait for a result; raises AssertionError where an error is due and none comes."""
        if not operation.must_fail:
            return hvd.synchronize(handle)
        try:
            hvd.synchronize(handle)
        except hvd.HorovodInternalError as error:
            assert operation.name in str(error), (operation, error)
            return None
        raise AssertionError((operation, "no error"))

    def check(self, operation: Operation, result: object) -> list[torch.Tensor]:
        """Return the result as tensors; raises AssertionError when it is not what it must be."""
        if result is None:
            return []
        got = list(result) if isinstance(result, (list, tuple)) else [result]
        for have, want in zip(got, operation.expected(self.rank), strict=True):
            assert operation.is_right(have, want), (operation, have, want)
        return got

    def compare(self, plan: list[Operation], results: dict[str, list[torch.Tensor]]) -> None:
        """Raise AssertionError when ranks differ where results must be equal to the last bit."""
        for where in self.sets:
            if not where.included():
                continue
            same = [
                o for o in plan
                if o.process_set is where and o.kind in (*REDUCING, "broadcast", "allgather")
            ]  # fmt: skip
            tensors = [tensor for o in same for tensor in results[o.name]]
            digests = [zlib.crc32(bytes_of(tensor)) for tensor in tensors]
            mine = torch.tensor([digests], dtype=torch.int64)
            everyone = hvd.allgather(mine, name="digests", process_set=where)
            assert bool((everyone == everyone[0]).all()), (same, everyone)

    def change_sets(self, chance: random.Random) -> None:
        """Add a process set, or remove one."""
        others = self.sets[1:]
        if others and (len(others) == MOST_SETS or chance.random() < 0.4):
            gone = chance.choice(others)
            self.sets.remove(gone)
            assert hvd.remove_process_set(gone)
            self.counts["set removed"] += 1
            return
        ranks = sorted(chance.sample(range(self.size), chance.randint(1, self.size - 1)))
        if ranks not in [s.ranks for s in others]:
            self.sets.append(hvd.add_process_set(ranks))
            self.counts["set added"] += 1

    def join(self, name: str, chance: random.Random) -> None:
        """Give the ranks different numbers of batches, and let the early ones join."""
        batches = [chance.randint(0, 4) for _ in range(self.size)]
        for i in range(batches[self.rank]):
            summed = hvd.allreduce(torch.ones(33), op=hvd.Sum, name=f"{name} {i}")
            assert torch.equal(summed, torch.full((33,), float(sum(b > i for b in batches))))
        last = hvd.join()
        assert batches[last] == max(batches), (batches, last)
        self.counts["join"] += 1


def main() -> None:
    """Run rounds until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, help="default: of the clock")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    seed = hvd.broadcast_object(args.seed if args.seed is not None else int(time.time()))
    if hvd.rank() == 0:
        print(f"soak: seed {seed}, {args.seconds:g} s on {hvd.size()} ranks", flush=True)
    soak, number = Soak(seed), 0
    held_bytes: list[int] = []
    begin_s = time.monotonic()
    going_on = True
    while going_on:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            soak.round(number)
        except Exception as error:
            raise RuntimeError(f"soak: seed {seed}, round {number}, rank {soak.rank}") from error
        number += 1
        passed_s = time.monotonic() - begin_s
        warm = (passed_s / args.seconds - WARM_UP) / (1 - WARM_UP)
        if warm >= len(held_bytes) / SAMPLES:
            held_bytes.append(resident_bytes())
        going_on = hvd.broadcast_object(passed_s < args.seconds)
    faulthandler.cancel_dump_traceback_later()
    grown = 0.0
    if number >= LEAST_ROUNDS:
        quarter = max(1, len(held_bytes) // 4)
        grown = median(held_bytes[-quarter:]) - median(held_bytes[:quarter])
        print(f"rank {soak.rank}: {grown / 2**20:+.1f} MiB since it was warm", flush=True)
    if soak.rank == 0:
        counts = ", ".join(f"{count} {kind}" for kind, count in soak.counts.most_common())
        print(f"soak: {number} rounds right: {counts}", flush=True)
    if grown > MOST_GROWTH_BYTES:
        sys.exit(f"rank {soak.rank}: resident memory grew by {grown / 2**20:.1f} MiB; seed {seed}")


if __name__ == "__main__":
    main()
