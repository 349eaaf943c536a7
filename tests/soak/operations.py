"""Collectives drawn by chance, what each rank gives to them, and what they must return.

Everything follows from a seed and a number of the round, so every rank knows what all others do.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

import qsgd_hpc.torch as hvd

MOST_OPERATIONS = 12
MOST = 4  # of an element
LARGE = (0, 4097, 65_536, 300_000)  # elements
# Elements of all ranks, from which each of them computes the result; with many, a machine's memory
# is the limit.
MOST_HELD, MANY, MOST_HELD_OF_MANY = 8 * 300_000, 8, 600_000
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Room for a product of all ranks' elements.
WIDE = (torch.int32, torch.int64, torch.float32, torch.float64)
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Sum": lambda all_ranks: all_ranks.sum(0),
    "Average": lambda all_ranks: all_ranks.mean(0),
    "Min": lambda all_ranks: all_ranks.amin(0),
    "Max": lambda all_ranks: all_ranks.amax(0),
    "Product": lambda all_ranks: all_ranks.prod(0),
}
KINDS = (
    *("allreduce", "scaled", "adasum", "coded", "grouped", "unequal", "barrier"),
    *("broadcast", "allgather", "alltoall", "reducescatter"),
)
REDUCING = ("allreduce", "scaled", "adasum", "coded", "grouped")


@dataclass(frozen=True)
class Operation:
    """One collective, as all ranks of its set know it."""

    kind: str
    name: str
    seed: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str
    bits: int
    root: int
    members: tuple[int, ...]
    process_set: hvd.ProcessSet

    def given_by(self, rank: int, part: int = 0) -> Tensor:
        """Return a rank's input: small whole numbers, whose sums are exact in every type."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {rank} {part}".encode()))
        shape = list(self.shape)
        if self.kind in ("allgather", "alltoall"):
            shape[0] = sum(self.rows(rank))
        drawn = torch.randint(0, MOST + 1, shape, generator=generator).to(self.dtype)
        # Every other one with gaps between its rows.
        return drawn.t().contiguous().t() if part == 0 and drawn.dim() == 2 else drawn

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
            case "scaled":
                factors = {"prescale_factor": 0.5, "postscale_factor": 4.0}
                return hvd.allreduce_async(mine, op=hvd.Sum, **factors, **where)
            case "adasum":  # of equal vectors, which is that vector
                return hvd.allreduce_async(self.given_by(self.root), op=hvd.Adasum, **where)
            case "coded":
                code = hvd.Compression.qsgd(bits=self.bits, error_feedback=False)
                return hvd.allreduce_async_(mine, compression=code, **where)
            case "grouped":
                parts = [self.given_by(rank, part) for part in range(self.parts)]
                return hvd.grouped_allreduce_async(parts, op=op, **where)
            case "unequal":
                return hvd.allreduce_async(torch.ones(3 + (rank == self.root)), **where)
            case "barrier":
                return hvd.allreduce_async(torch.ones(()), op=hvd.Sum, **where)
            case "broadcast":
                return hvd.broadcast_async(mine, self.root, **where)
            case "allgather":
                return hvd.allgather_async(mine, **where)
            case "alltoall":
                return hvd.alltoall_async(mine, splits=self.rows(rank), **where)
            case "reducescatter":
                return hvd.reducescatter_async(mine, op=hvd.Sum, **where)
        raise AssertionError(self.kind)

    @property
    def parts(self) -> int:
        """How many tensors there are in a group."""
        return 1 + self.root % 4 if self.kind == "grouped" else 1

    @property
    def must_fail(self) -> bool:
        """Whether the ranks disagree."""
        return self.kind == "unequal" and len(self.members) > 1

    def is_right(self, have: Tensor, want: Tensor) -> bool:
        """Tell whether a result is what is expected, but for rounding."""
        if (have.dtype, have.shape) != (want.dtype, want.shape):
            return False
        most = 1e-8
        if self.kind == "coded" and len(self.members) > 1:
            # Each rank's values are rounded to the next level, and so is what is sent back.
            most = 2 * MOST / (2 ** (self.bits - 1) - 1)
        return torch.allclose(have.double(), want.double(), rtol=1e-2, atol=most)

    def expected(self, rank: int) -> list[Tensor]:
        """Return the tensors that `rank` must get."""
        place = self.members.index(rank)
        match self.kind:
            case "allreduce" | "grouped" | "coded":
                return [self._reduced(part) for part in range(self.parts)]
            case "scaled":
                return [(2.0 * self._reduced(0).double()).to(self.dtype)]
            case "adasum":
                return [self.given_by(self.root)]
            case "unequal":
                return [torch.ones(4)]  # alone
            case "barrier":
                return [torch.tensor(float(len(self.members)))]
            case "broadcast":
                return [self.given_by(self.root)]
            case "allgather":
                return [torch.cat([self.given_by(r) for r in self.members])]
            case "alltoall":
                parts = [self.given_by(r).split(self.rows(r))[place] for r in self.members]
                return [
                    torch.cat(parts),
                    torch.tensor([len(part) for part in parts], dtype=torch.int32),
                ]
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
    dtype, op = _type_and_op(chance, kind)
    cut = kind in ("allgather", "alltoall", "reducescatter")  # along the first dimension
    shape = tuple(chance.choice((1, 2, 3, 17, 64)) for _ in range(chance.randint(cut, 3)))
    if kind in REDUCING and chance.random() < 0.1:
        shape = (chance.choice(LARGE),)
    members = tuple(where.ranks or ())
    most = MOST_HELD if len(members) <= MANY else MOST_HELD_OF_MANY
    while prod(shape) * len(members) > most:
        shape = (*shape[:-1], shape[-1] // 4)
    # A name comes again with another shape or type: what was known of it must not be used.
    name = f"{kind}.{number}" + (f".{shape}" if kind == "coded" else "")
    bits, root = chance.choice((2, 4, 8)), chance.choice(members)
    return Operation(kind, name, seed, shape, dtype, op, bits, root, members, where)


def _type_and_op(chance: random.Random, kind: str) -> tuple[torch.dtype, str]:
    if kind == "coded":
        return torch.float32, "Average"
    if kind in ("scaled", "adasum"):
        return chance.choice(FLOATS), "Sum"
    if kind in ("broadcast", "allgather", "alltoall"):
        return chance.choice((*INTEGERS, *FLOATS, torch.bool)), "Sum"
    dtype = chance.choice(INTEGERS + FLOATS)
    # The integer mean of narrow types has rules of its own; the contract suite has them.
    ops = [
        op
        for op in (("Sum",) if kind == "reducescatter" else REDUCTIONS)
        if (op != "Average" or dtype.is_floating_point) and (op != "Product" or dtype in WIDE)
    ]
    return dtype, chance.choice(ops)
