"""A rank's shard of a module as one message: large parameters coded, all others uncompressed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qsgd_hpc import _core
from qsgd_hpc.compression import Lossy
from qsgd_hpc.torch.fsdp.layout import Part
from qsgd_hpc.torch.ops._tensors import name_of

__all__ = ["Key", "ShardCodec"]

HEADER_BYTES = 32
ALIGNED_BYTES = 64


@dataclass(frozen=True)
class Key:
    """The key of a message's rounding noise, besides the parameter's name."""

    seed: int
    step: int
    rank: int
    stream: int
    """Distinguishes messages of the same step and rank."""


@dataclass(frozen=True)
class _Piece:
    elements: slice
    """Range in the shard."""
    bytes: slice
    """Range in the message."""
    id: int
    spec: _core.CodecSpec | None


class ShardCodec:
    """Codes shards of one layout, and decodes them.

    Args:
        parts: the parameters that FSDP2 may have packed; if they do not fill the shard (some had
            no gradient in this step), the shard is one parameter named ``whole``.
        compression: decides for each parameter by its name and whole shape.
        elements: number of elements of a shard, including padding.
        ranks: number of ranks over which the module is sharded.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        whole: str,
        compression: Lossy,
        elements: int,
        ranks: int,
        dtype: torch.dtype,
        threads: int,
    ) -> None:
        if sum(part.elements(ranks) for part in parts) != elements:
            parts = [Part(whole, (ranks, elements), 0)]
        self.dtype = dtype
        self._threads = threads
        self._pieces: list[_Piece] = []
        at = filled = 0
        for part in parts:
            count = part.elements(ranks)
            coding = compression.coding_for_gradient(part.name, part.shape, name_of(dtype))
            spec = None if coding is None else coding.spec
            size = count * dtype.itemsize if spec is None else HEADER_BYTES + spec.bytes(count)
            id_ = zlib.crc32(part.name.encode())
            self._pieces.append(
                _Piece(slice(at, at + count), slice(filled, filled + size), id_, spec)
            )
            at += count
            filled += -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
        self.bytes = filled
        """Bytes of a message, the same on every rank."""

    def encode(self, shard: torch.Tensor, message: torch.Tensor, key: Key) -> None:
        """Write a message.

        Args:
            shard: shape (elements,), on the host, contiguous.
            message: shape (bytes,), uint8.
        """
        for piece in self._pieces:
            mine, out = shard[piece.elements], message[piece.bytes]
            if piece.spec is None:
                out.view(self.dtype).copy_(mine)
                continue
            _core.encode_into(
                _array(mine),
                out.numpy(),
                spec=piece.spec,
                seed=key.seed,
                tensor=(piece.id + key.stream) % 2**32,
                step=key.step,
                rank=key.rank,
                dtype=name_of(self.dtype),
                threads=self._threads,
            )

    def decode(self, message: torch.Tensor, shard: torch.Tensor) -> None:
        """Read a message into a shard on the host."""
        for piece in self._pieces:
            self._decode(piece, message[piece.bytes], shard[piece.elements])

    def sum(
        self, messages: Sequence[torch.Tensor | None], own: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Sum the shard over the ranks in their order, in float32 at least.

        Args:
            messages: by rank; None stands for ``own``, which is uncoded.
            out: shape (elements,), on the host.
        """
        for piece in self._pieces:
            total = torch.zeros(out[piece.elements].shape, dtype=_wide(self.dtype))
            for message in messages:
                if message is None:
                    total += own[piece.elements]
                else:
                    self._add(piece, message[piece.bytes], total)
            out[piece.elements] = total

    def _decode(self, piece: _Piece, message: torch.Tensor, out: torch.Tensor) -> None:
        if piece.spec is None:
            out.copy_(message.view(self.dtype))
            return
        _core.decode_into(
            message.numpy(),
            _array(out),
            spec=piece.spec,
            dtype=name_of(out.dtype),
            threads=self._threads,
        )

    def _add(self, piece: _Piece, message: torch.Tensor, total: torch.Tensor) -> None:
        if piece.spec is None:
            total += message.view(self.dtype)
        elif total.dtype == torch.float32:
            _core.decode_add_into(
                message.numpy(), total.numpy(), spec=piece.spec, threads=self._threads
            )
        else:
            part = torch.empty_like(total)
            self._decode(piece, message, part)
            total += part


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:  # of which numpy knows nothing
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()
