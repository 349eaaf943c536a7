"""Messages of each allreduce of the core, round by round, without times; pure.

The sizes on the wire are those of csrc/collectives/schedule.h and segments.cc, the schedules those
of csrc/collectives; a test runs the core on threads and compares the bytes that every rank sends.
The core sends messages in segments, one after the other; here a message is all data that one rank
sends to another in a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from qsgd_hpc.env import COMPRESSED
from qsgd_hpc.errors import UsageError

__all__ = [
    "ALGORITHMS",
    "FLOAT_BYTES",
    "Coding",
    "Layout",
    "Messages",
    "Phase",
    "Schedule",
    "resolve",
    "schedule",
]

FLOAT_BYTES = 4
TILE = 64
HEADER_BYTES = 32
SEGMENT = 1 << 18  # most elements of a message

Tensors = Sequence[tuple[int, int]]
"""Fused gradients: (elements, id) of each; the id rotates the assignment of parts to ranks."""


@dataclass(frozen=True)
class Coding:
    """QSGD codes: bits per element, sign included, and elements that share one float32 scale."""

    bits: int
    bucket: int = 512

    def bytes(self, count: int) -> int:
        """Return the bytes of `count` elements that start at a bucket: scales, then codes."""
        scales = -(-count // self.bucket)
        return scales * FLOAT_BYTES + -(-count // TILE) * (TILE // 8 * self.bits)


def parts(count: int, granule: int, ranks: int) -> np.ndarray:
    """Return the first elements of `ranks` nearly equal parts of `count` elements, and the end.

    Returns:
        int64, shape (ranks + 1,); all but the last are multiples of `granule`.
    """
    units = -(-count // granule)
    cuts = units * np.arange(ranks + 1, dtype=np.int64) // ranks
    return np.minimum(cuts * granule, count)


def owned(tensor: tuple[int, int], granule: int, ranks: int) -> np.ndarray:
    """Return how many elements of a tensor each rank owns; int64, shape (ranks,)."""
    count, name = tensor
    sizes = np.diff(parts(count, granule, ranks))
    return np.roll(sizes, -(name % ranks))


def chunk_bytes(tensors: Tensors, coding: Coding, ranks: int, *, cut: bool = True) -> np.ndarray:
    """Return the bytes of all messages with the elements that each rank owns, headers included.

    Args:
        tensors: the fused gradients.
        coding: their codes.
        ranks: number of ranks that share the list.
        cut: False if every rank sends the complete list (a compressed allgather).
    Returns:
        int64, shape (ranks,), or (1,) for a list that is not cut.
    """
    limit = max(SEGMENT // coding.bucket, 1) * coding.bucket
    owners = ranks if cut else 1
    sizes = [tuple(owned(tensor, coding.bucket, owners).tolist()) for tensor in tensors]
    return np.array(
        [_message_bytes(tuple(pieces), coding, limit) for pieces in zip(*sizes, strict=True)],
        dtype=np.int64,
    )


@cache
def _message_bytes(pieces: tuple[int, ...], coding: Coding, limit: int) -> int:
    """Return the bytes of one owner's messages: its pieces of all tensors, packed into segments."""
    total, room, messages = 0, 0, 0
    for piece in pieces:
        left = piece
        while left > 0:
            if room < coding.bucket:
                messages, room = messages + 1, limit
            count = min(left, room // coding.bucket * coding.bucket)
            total += coding.bytes(count)
            room -= count
            left -= count
    return total + messages * HEADER_BYTES


DOUBLING_BYTES = 64 << 10
"""Up to this size, `direct` uses recursive doubling if the ranks are a power of two."""
SMALL_BYTES = 16 << 10
"""Up to this size, latency outweighs bandwidth, so `direct` sends few messages."""
GATHERED_BYTES = 128 << 10
"""Up to this size of all ranks' inputs together, `direct` gathers complete inputs."""
HALVING_RANKS = 16
"""From this many ranks, `direct` uses Rabenseifner's algorithm for up to SMALL_BYTES per rank."""
SHARED_ONCE_BYTES = 16 << 10
"""Up to this size, ranks of a node read each other's complete inputs."""
MOST_SRA_RANKS = 64


@dataclass(frozen=True)
class Layout:
    """Ranks on nodes: rank r is on node r // per_node."""

    ranks: int
    per_node: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.per_node < 1 or self.ranks % self.per_node:
            raise UsageError(
                f"{self.ranks} ranks with {self.per_node} on each node: expected a multiple"
            )

    @property
    def nodes(self) -> int:
        return self.ranks // self.per_node


@dataclass(frozen=True)
class Messages:
    """Messages in flight at the same time: int64 arrays of equal length."""

    sources: np.ndarray
    targets: np.ndarray
    bytes: np.ndarray

    @classmethod
    def joined(cls, rounds: Sequence[Messages]) -> Messages:
        """Return the messages of several rounds together."""
        return cls(
            np.concatenate([m.sources for m in rounds]),
            np.concatenate([m.targets for m in rounds]),
            np.concatenate([m.bytes for m in rounds]),
        )


@dataclass(frozen=True)
class Phase:
    """Rounds of messages.

    Attributes:
        rounds: number of rounds.
        at: returns the messages of round i.
        pattern: phases of equal pattern load a network equally, whatever their sizes.
        together: all rounds are in flight at the same time, as in a direct exchange; otherwise each
            waits for the previous one.
        alike: every round has the same messages as the first, except for rounding of the parts.
        members: number of ranks that exchange with one another, for the pattern "exchange".
    """

    rounds: int
    at: Callable[[int], Messages]
    pattern: str
    together: bool = False
    alike: bool = False
    members: int = 0


@dataclass(frozen=True)
class Schedule:
    """One allreduce.

    Attributes:
        phases: the phases on the network, in order.
        memory_bytes: bytes that each rank passes to others through its node's memory, shape
            (ranks,).
        memory_phases: 1 for an allreduce only in memory, 2 before and after one between nodes, 0
            for none.
        coded: elements that a rank encodes or sums.
    """

    layout: Layout
    algorithm: str
    phases: tuple[Phase, ...]
    memory_bytes: np.ndarray
    memory_phases: int = 0
    coded: int = 0

    def sent(self) -> np.ndarray:
        """Return the bytes that each rank sends in messages; int64, shape (ranks,)."""
        total = np.zeros(self.layout.ranks, dtype=np.int64)
        for phase in self.phases:
            for i in range(phase.rounds):
                messages = phase.at(i)
                np.add.at(total, messages.sources, messages.bytes)
        return total


def resolve(algorithm: str, layout: Layout, coding: Coding | None) -> str:
    """Return the algorithm that `auto` selects on these ranks (csrc/collectives/allreduce.cc)."""
    one_node = layout.nodes == 1
    if algorithm in ("hierarchical_sra", "leaders_sra") and one_node:
        return "sra"
    if algorithm != "auto":
        return algorithm
    if layout.per_node == 1 or (one_node and coding):
        return _auto_among(layout.ranks, coding)
    if one_node:
        return "shared"
    return "hierarchical_sra" if coding else "hierarchical"


def _auto_among(ranks: int, coding: Coding | None) -> str:
    """Return the algorithm that `auto` selects without shared memory (collectives/algorithm.cc)."""
    if not coding:
        return "direct"
    return "sra2d" if ranks > MOST_SRA_RANKS else "sra"


def schedule(
    algorithm: str, layout: Layout, tensors: Tensors, coding: Coding | None = None
) -> Schedule:
    """Return the messages of an allreduce of float32 gradients.

    Args:
        algorithm: a name in ALGORITHMS, or "auto".
        layout: the ranks.
        tensors: (elements, id) of the fused gradients.
        coding: for compressed algorithms; None for the others.
    Raises:
        UsageError: the algorithm is unknown, or does not fit the coding.
    """
    name = resolve(algorithm, layout, coding)
    if name not in ALGORITHMS:
        raise UsageError(f"algorithm {name!r}: known are auto, {', '.join(ALGORITHMS)}")
    if (name in COMPRESSED) != (coding is not None):
        raise UsageError(
            f"algorithm {name!r} {'needs codes' if name in COMPRESSED else 'sends float32'}; "
            "choose another, or auto"
        )
    if name == "shared" and layout.nodes > 1:
        raise UsageError(
            "algorithm 'shared' is for ranks of one node; choose 'hierarchical', or auto"
        )
    nothing = np.zeros(layout.ranks, dtype=np.int64)
    count = sum(elements for elements, _ in tensors)
    if layout.ranks == 1 or count == 0:
        return Schedule(layout, name, (), nothing)
    if name == "shared":
        return Schedule(layout, name, (), _shared_bytes(layout, count), 1)
    if name in _ACROSS:
        return _hierarchical(name, layout, tensors, coding)
    return Schedule(
        layout, name, _FLAT[name](layout.ranks, tensors, coding), nothing, 0, count if coding else 0
    )


def _shift(ranks: int, hop: int, sizes: np.ndarray) -> Messages:
    """Return the round in which each rank i sends sizes[i] to rank i + hop."""
    sources = np.arange(ranks)
    return Messages(sources, (sources + hop) % ranks, sizes)


def _exchange(ranks: int, chunk: np.ndarray) -> tuple[Phase, Phase]:
    """Return a reduce-scatter by direct exchange and an allgather, by the bytes of each chunk."""

    def scatter(i: int) -> Messages:
        return _shift(ranks, i + 1, np.roll(chunk, -(i + 1)))

    one = Phase(ranks - 1, scatter, "exchange", together=True, members=ranks)
    return one, replace(one, at=lambda i: _shift(ranks, i + 1, chunk))


def _direct(ranks: int, tensors: Tensors, coding: Coding | None) -> tuple[Phase, ...]:
    total = sum(count for count, _ in tensors)
    size = total * FLOAT_BYTES
    if ranks.bit_count() == 1 and size <= DOUBLING_BYTES:
        return _recursive_doubling(ranks, tensors, coding)
    if size > SMALL_BYTES:
        if ranks >= HALVING_RANKS and size <= ranks * SMALL_BYTES:
            return _rabenseifner(ranks, tensors, coding)
        sizes = np.diff(parts(total, 64, ranks)) * FLOAT_BYTES
        return _exchange(ranks, sizes)
    if ranks * size > GATHERED_BYTES:
        return _recursive_doubling(ranks, tensors, coding)

    def doubling(i: int) -> Messages:
        have = 1 << i
        return _shift(ranks, ranks - have, np.full(ranks, size * min(have, ranks - have)))

    return (Phase((ranks - 1).bit_length(), doubling, "doubling"),)


def _sra(ranks: int, tensors: Tensors, coding: Coding | None) -> tuple[Phase, ...]:
    assert coding is not None
    return _exchange(ranks, chunk_bytes(tensors, coding, ranks))


def _sra2d(ranks: int, tensors: Tensors, coding: Coding | None) -> tuple[Phase, ...]:
    assert coding is not None
    rows = max(r for r in range(1, int(ranks**0.5) + 1) if ranks % r == 0)
    if rows == 1:
        return _sra(ranks, tensors, coding)
    columns = ranks // rows
    chunk = chunk_bytes(tensors, coding, ranks)
    of_column = chunk.reshape(rows, columns).sum(axis=0)
    sources = np.arange(ranks)
    row, column = np.divmod(sources, columns)

    def along_row(i: int, scatter: bool) -> Messages:
        there = (column + i + 1) % columns
        return Messages(sources, row * columns + there, of_column[there if scatter else column])

    def along_column(i: int, scatter: bool) -> Messages:
        targets = (row + i + 1) % rows * columns + column
        return Messages(sources, targets, chunk[targets if scatter else sources])

    def by_row(scatter: bool) -> Phase:
        return Phase(columns - 1, lambda i: along_row(i, scatter), "row", together=True)

    def by_column(scatter: bool) -> Phase:
        return Phase(rows - 1, lambda i: along_column(i, scatter), "column", together=True)

    return by_row(True), by_column(True), by_column(False), by_row(False)


def _allgather(ranks: int, tensors: Tensors, coding: Coding | None) -> tuple[Phase, ...]:
    assert coding is not None
    sizes = np.repeat(chunk_bytes(tensors, coding, ranks, cut=False), ranks)
    return (_exchange(ranks, sizes)[1],)


def _trips(ranks: int, chunk: np.ndarray) -> tuple[Phase, ...]:
    """Return two rounds of a ring: a reduce-scatter, then an allgather."""

    def phase(ahead: int) -> Phase:
        def at(i: int) -> Messages:
            return _shift(ranks, 1, np.roll(chunk, i + ahead))

        return Phase(ranks - 1, at, "ring", alike=True)

    return phase(1), phase(0)


def _ring(ranks: int, tensors: Tensors, coding: Coding | None) -> tuple[Phase, ...]:
    counts = np.sum([owned(tensor, 1, ranks) for tensor in tensors], axis=0)
    return _trips(ranks, counts * FLOAT_BYTES)


def _requantizing_ring(ranks: int, tensors: Tensors, coding: Coding | None) -> tuple[Phase, ...]:
    assert coding is not None
    return _trips(ranks, chunk_bytes(tensors, coding, ranks))


def _folded(ranks: int, size: int, inner: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Extend an algorithm for a power of two of ranks to all ranks.

    Each surplus rank sends its input to another rank before it, and receives the result after it.
    """
    power = 1 << (ranks.bit_length() - 1)
    surplus = np.arange(power, ranks)
    if not len(surplus):
        return inner
    sizes = np.full(len(surplus), size)
    return (
        Phase(1, lambda i: Messages(surplus, surplus - power, sizes), "fold"),
        *inner,
        Phase(1, lambda i: Messages(surplus - power, surplus, sizes), "fold"),
    )


def _recursive_doubling(ranks: int, tensors: Tensors, coding: Coding | None) -> tuple[Phase, ...]:
    size = sum(count for count, _ in tensors) * FLOAT_BYTES
    rounds = ranks.bit_length() - 1
    sources = np.arange(1 << rounds)
    whole = np.full(len(sources), size)
    inner = Phase(rounds, lambda i: Messages(sources, sources ^ (1 << i), whole), "hops")
    return _folded(ranks, size, (inner,))


def _rabenseifner(ranks: int, tensors: Tensors, coding: Coding | None) -> tuple[Phase, ...]:
    count = sum(elements for elements, _ in tensors)
    rounds = ranks.bit_length() - 1
    sources = np.arange(1 << rounds)
    cuts = parts(count, 1, len(sources))
    places = np.zeros_like(sources)  # each rank's number with its bits in reverse
    for bit in range(rounds):
        places = 2 * places + ((sources >> bit) & 1)

    def group_bytes(member: np.ndarray, width: int) -> np.ndarray:
        first = member // width * width
        sizes: np.ndarray = (cuts[first + width] - cuts[first]) * FLOAT_BYTES
        return sizes

    def halve(i: int) -> Messages:
        hop = len(sources) >> (i + 1)
        return Messages(sources, sources ^ (1 << i), group_bytes(places ^ hop, hop))

    def double(i: int) -> Messages:
        hop = len(sources) >> (i + 1)
        return Messages(sources, sources ^ hop, group_bytes(places, 1 << i))

    inner = (Phase(rounds, halve, "halves"), Phase(rounds, double, "halves"))
    return _folded(ranks, count * FLOAT_BYTES, inner)


def _shared_bytes(layout: Layout, count: int) -> np.ndarray:
    ranks, size = layout.ranks, count * FLOAT_BYTES
    # If cut, others read their parts of a rank's input and the sum of its own part: 2 (p-1)/p.
    whole = size * (ranks - 1)
    cut = ranks > 2 and size > SHARED_ONCE_BYTES
    return np.full(ranks, 2 * whole // ranks if cut else whole)


def _hierarchical(name: str, layout: Layout, tensors: Tensors, coding: Coding | None) -> Schedule:
    """Sum shards in each node's memory, then reduce shard j between the owners j of all nodes."""
    per_node, nodes = layout.per_node, layout.nodes
    owners = _ACROSS[name] or per_node
    granule = coding.bucket if coding else 1
    sizes = [owned(tensor, granule, owners) for tensor in tensors]
    shards = [
        [(int(size[j]), tensor[1]) for size, tensor in zip(sizes, tensors, strict=True)]
        for j in range(owners)
    ]
    across = _FLAT[_auto_among(nodes, coding)]
    by_shard = [across(nodes, shard, coding) for shard in shards]
    counts = np.array([sum(count for count, _ in shard) for shard in shards], dtype=np.int64)
    own = np.pad(counts, (0, per_node - owners))
    given = (counts.sum() - own + own * (per_node - 1)) * FLOAT_BYTES
    return Schedule(
        layout,
        name,
        _side_by_side(layout, by_shard),
        np.tile(given, nodes),
        2,
        int(counts.max()) if coding else 0,
    )


def _side_by_side(layout: Layout, by_shard: list[tuple[Phase, ...]]) -> tuple[Phase, ...]:
    """Combine the schedules between nodes of all owners, the first local ranks, into one."""
    longest = max(by_shard, key=len)

    def joined(place: int, i: int) -> Messages:
        found = []
        for j, phases in enumerate(by_shard):
            if place < len(phases) and i < phases[place].rounds:
                m = phases[place].at(i)
                ranks = layout.per_node
                found.append(Messages(m.sources * ranks + j, m.targets * ranks + j, m.bytes))
        return Messages.joined(found)

    def at(place: int) -> Callable[[int], Messages]:
        return lambda i: joined(place, i)

    return tuple(replace(phase, at=at(place)) for place, phase in enumerate(longest))


_FLAT: dict[str, Callable[[int, Tensors, Coding | None], tuple[Phase, ...]]] = {
    "direct": _direct,
    "ring": _ring,
    "recursive_doubling": _recursive_doubling,
    "rabenseifner": _rabenseifner,
    "sra": _sra,
    "sra2d": _sra2d,
    "allgather": _allgather,
    "requantizing_ring": _requantizing_ring,
}
# Number of ranks of a node that communicate with other nodes; None: all.
_ACROSS = {"hierarchical": None, "leaders": 1, "hierarchical_sra": None, "leaders_sra": 1}
ALGORITHMS = (*_FLAT, "shared", *_ACROSS)
