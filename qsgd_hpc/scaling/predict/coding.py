"""Sizes on the wire: which rank owns which elements, and the bytes of their codes.

The same arithmetic as csrc/collectives/schedule.h and segments.cc; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

__all__ = ["FLOAT_BYTES", "Coding", "Tensors", "chunk_bytes", "chunk_counts", "owned", "parts"]

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


def chunk_counts(tensors: Tensors, granule: int, ranks: int) -> np.ndarray:
    """Return how many elements of a fused list each rank owns; int64, shape (ranks,)."""
    total = np.zeros(ranks, dtype=np.int64)
    for tensor in tensors:
        total += owned(tensor, granule, ranks)
    return total


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
