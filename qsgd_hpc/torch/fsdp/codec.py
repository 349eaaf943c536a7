"""Conversion between shards and messages: large parameters are coded, all others copied.

Shards have shape (rows, elements), messages (rows, bytes); both are contiguous, on ``place``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qsgd_hpc.torch.fsdp.coders import Coder, Streams
from qsgd_hpc.torch.fsdp.pieces import Piece, message_bytes

__all__ = ["ShardCodec"]


class ShardCodec:
    """An encoder and decoder of shards of one layout.

    Args:
        pieces: all pieces of a shard (:func:`qsgd_hpc.torch.fsdp.pieces.pieces_of`).
        coder: the coder of the pieces that have a code.
        place: the device in whose memory it codes.
    """

    def __init__(
        self, pieces: Sequence[Piece], coder: Coder, dtype: torch.dtype, place: torch.device
    ) -> None:
        self.place = place
        self.bytes = message_bytes(pieces)
        """Bytes of a message, the same on every rank."""
        self._dtype = dtype
        self._coder = coder
        self._exact = [piece for piece in pieces if piece.spec is None]

    def messages(self, rows: int) -> torch.Tensor:
        """Return uninitialised memory for messages."""
        return torch.empty(rows, self.bytes, dtype=torch.uint8, device=self.place)

    def encode(
        self, shards: torch.Tensor, messages: torch.Tensor, streams: Streams, step: int, rank: int
    ) -> None:
        """Write this rank's messages to the rows in ``streams``; to others, only the exact parts.

        Args:
            streams: for each row, the number that distinguishes its noise from other messages of
                this step and rank.
        """
        for piece in self._exact:
            self._exact_part(piece, messages).copy_(shards[:, piece.elements])
        self._coder.encode(shards, messages, streams, step, rank)

    def decode(self, messages: torch.Tensor, shards: torch.Tensor) -> None:
        """Read messages into shards."""
        for piece in self._exact:
            shards[:, piece.elements] = self._exact_part(piece, messages)
        self._coder.decode(messages, shards)

    def sum(
        self,
        messages: torch.Tensor,
        own_rank: int,
        own: torch.Tensor,
        factor: float,
        out: torch.Tensor,
    ) -> None:
        """Sum a shard over the ranks in rank order, in float32 at least.

        Args:
            messages: by rank; the row of ``own_rank`` is not read.
            own: shape (elements,), the uncoded addend of this rank.
            factor: factor by which the sum is multiplied.
            out: shape (elements,).
        """
        self._coder.sum(messages, own_rank, own, factor, out)
        if not self._exact:
            return
        wide = torch.promote_types(self._dtype, torch.float32)
        totals = [torch.zeros(p.count, dtype=wide, device=self.place) for p in self._exact]
        received = [self._exact_part(piece, messages) for piece in self._exact]
        for rank in range(len(messages)):
            addends = [part[rank] for part in received]
            if rank == own_rank:
                addends = [own[piece.elements] for piece in self._exact]
            torch._foreach_add_(totals, addends)
        torch._foreach_mul_(totals, factor)
        outputs = [out[piece.elements] for piece in self._exact]
        torch._foreach_copy_(outputs, totals)  # type: ignore[no-untyped-call]

    def _exact_part(self, piece: Piece, messages: torch.Tensor) -> torch.Tensor:
        """Return a view of an uncompressed piece in all messages, shape (rows, its elements)."""
        return messages[:, piece.bytes].view(self._dtype)
