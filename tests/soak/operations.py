"""Collectives drawn by chance, what each rank gives to them, and what they must return.

Everything follows from a seed and a number of the round, so every rank knows what all others do.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import qsgd_hpc.torch as hvd

MOST_OPERATIONS = 12
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Sum": lambda all_ranks: all_ranks.sum(0),
    "Average": lambda all_ranks: all_ranks.mean(0),
    "Min": lambda all_ranks: all_ranks.amin(0),
    "Max": lambda all_ranks: all_ranks.amax(0),
}
KINDS = ("allreduce", "coded", "grouped", "broadcast", "allgather", "alltoall", "reducescatter")


@dataclass(frozen=True)
class Operation:
    """One collective, as all ranks of its set know it."""

    kind: str
    name: str
    seed: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str
    root: int
    members: tuple[int, ...]
    process_set: hvd.ProcessSet

    def given_by(self, rank: int, part: int = 0) -> Tensor:
        """Return a rank's input: small whole numbers, whose sums are exact in every type."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {rank} {part}".encode()))
        shape = list(self.shape)
        if self.kind in ("allgather", "alltoall"):
            shape[0] = sum(self.rows(rank))
        return torch.randint(0, 5, shape, generator=generator).to(self.dtype)

    def rows(self, rank: int) -> list[int]:
        """Return how many rows a rank has for each rank of the set."""
        drawn = random.Random(f"{self.seed} rows {rank}")
        return [drawn.randint(0, 5) for _ in self.members]

    def start(self, rank: int) -> Any:
        """Submit this rank's part; return the handle."""
        mine = self.given_by(rank)
        where = {"name": self.name, "process_set": self.process_set}
        op = getattr(hvd, self.op)
        match self.kind:
            case "allreduce":
                return hvd.allreduce_async(mine, op=op, **where)
            case "coded":
                return hvd.allreduce_async_(mine, compression=hvd.Compression.qsgd(bits=4), **where)
            case "grouped":
                return hvd.grouped_allreduce_async([mine, self.given_by(rank, 1)], op=op, **where)
            case "broadcast":
                return hvd.broadcast_async(mine, self.root, **where)
            case "allgather":
                return hvd.allgather_async(mine, **where)
            case "alltoall":
                return hvd.alltoall_async(mine, splits=self.rows(rank), **where)
            case "reducescatter":
                return hvd.reducescatter_async(mine, op=hvd.Sum, **where)
        raise AssertionError(self.kind)

    def expected(self, rank: int) -> list[Tensor]:
        """Return the tensors that `rank` must get; none where rounding is random."""
        place = self.members.index(rank)
        match self.kind:
            case "allreduce" | "grouped":
                return [self._reduced(part) for part in range(2 if self.kind == "grouped" else 1)]
            case "coded":
                return []
            case "broadcast":
                return [self.given_by(self.root)]
            case "allgather":
                return [torch.cat([self.given_by(r) for r in self.members])]
            case "alltoall":
                parts = [self.given_by(r).split(self.rows(r))[place] for r in self.members]
                return [torch.cat(parts)]
        return [_shares(self._reduced(0), len(self.members))[place]]

    def _reduced(self, part: int) -> Tensor:
        wide = torch.stack([self.given_by(r, part).double() for r in self.members])
        return REDUCTIONS[self.op](wide).to(self.dtype)


def _shares(whole: Tensor, ranks: int) -> list[Tensor]:
    least, more = divmod(len(whole), ranks)
    return list(whole.split([least + (r < more) for r in range(ranks)]))


def draw(seed: str, sets: list[hvd.ProcessSet]) -> list[Operation]:
    """Return the operations of one round, each over one of the sets."""
    chance = random.Random(seed)
    return [
        _draw_one(chance, f"{seed} {i}", i, chance.choice(sets))
        for i in range(chance.randint(1, MOST_OPERATIONS))
    ]


def _draw_one(chance: random.Random, seed: str, number: int, where: hvd.ProcessSet) -> Operation:
    kind = chance.choice(KINDS)
    dtype = torch.float32 if kind == "coded" else chance.choice(INTEGERS + FLOATS)
    # The integer mean of narrow types has rules of its own; the contract suite has them.
    ops = ("Sum",) if kind == "reducescatter" else tuple(REDUCTIONS)
    op = chance.choice(ops if dtype.is_floating_point else tuple(o for o in ops if o != "Average"))
    shape = tuple(chance.choice((1, 2, 3, 17, 64)) for _ in range(chance.randint(1, 3)))
    if kind in ("allreduce", "coded") and chance.random() < 0.1:
        shape = (chance.choice((4097, 65_536, 300_000)),)
    members = tuple(where.ranks or ())
    # A name comes again with another shape or type: what was known of it must not be used.
    name = f"{kind}.{number}" + (f".{shape}" if kind == "coded" else "")
    return Operation(kind, name, seed, shape, dtype, op, chance.choice(members), members, where)
