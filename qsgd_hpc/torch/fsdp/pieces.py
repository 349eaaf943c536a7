"""Layout of a rank's shard as one message: large parameters coded, all others uncompressed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qsgd_hpc import _core
from qsgd_hpc.compression import Lossy
from qsgd_hpc.torch.fsdp.layout import Part
from qsgd_hpc.torch.ops._tensors import name_of

__all__ = ["Piece", "message_bytes", "pieces_of"]

HEADER_BYTES = 32
ALIGNED_BYTES = 64


@dataclass(frozen=True)
class Piece:
    """A parameter's shard; ``spec`` is None for one that is sent uncompressed."""

    elements: slice
    """Range in the shard."""
    bytes: slice
    """Range in the message."""
    id: int
    spec: _core.CodecSpec | None

    @property
    def count(self) -> int:
        """Return the number of elements."""
        return int(self.elements.stop - self.elements.start)


def pieces_of(
    parts: Sequence[Part],
    module: str,
    compression: Lossy,
    elements: int,
    ranks: int,
    dtype: torch.dtype,
) -> list[Piece]:
    """Return the pieces of a shard, in order.

    Args:
        parts: the parameters that FSDP2 may have packed; if they do not fill the shard (some had
            no gradient in this step), the shard is one parameter named ``module``.
        compression: chooses each parameter's code by its name and unsharded shape.
        elements: number of elements of a shard, including padding.
        ranks: number of ranks over which the module is sharded.
    """
    if sum(part.elements(ranks) for part in parts) != elements:
        parts = [Part(module, (ranks, elements), 0)]
    pieces: list[Piece] = []
    at = filled = 0
    for part in parts:
        count = part.elements(ranks)
        coding = compression.coding_for_gradient(part.name, part.shape, name_of(dtype))
        spec = None if coding is None else coding.spec
        size = count * dtype.itemsize if spec is None else HEADER_BYTES + spec.bytes(count)
        id_ = zlib.crc32(part.name.encode())
        pieces.append(Piece(slice(at, at + count), slice(filled, filled + size), id_, spec))
        at += count
        filled += _aligned(size)
    return pieces


def message_bytes(pieces: Sequence[Piece]) -> int:
    """Return the bytes of a message, the same on every rank."""
    return _aligned(pieces[-1].bytes.stop) if pieces else 0


def _aligned(size: int) -> int:
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
