"""Conversion between shards and messages: large parameters are coded, all others copied.

Shards have shape (rows, elements), messages (rows, bytes); both are contiguous, and each row
belongs to one rank. Pieces that have a code are coded on the host's processor or by GPU kernels:
both write the same bytes from the same noise, except that kernels leave headers empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qsgd_hpc import _core
from qsgd_hpc.torch._distributed import HOST, by_code, uploaded
from qsgd_hpc.torch.fsdp.layout import Piece, message_bytes
from qsgd_hpc.torch.ops._tensors import current_stream_of, name_of

__all__ = ["DeviceCodec", "HostCodec", "ShardCodec", "Streams"]

Streams = Mapping[int, int]
"""For each row to code, the number that distinguishes its noise from the other rows'."""


class ShardCodec:
    """An encoder and decoder of shards of one layout; this base class copies exact pieces.

    Args:
        pieces: all pieces of a shard (:func:`qsgd_hpc.torch.fsdp.layout.pieces_of`).
        place: the device in whose memory it codes.
    """

    def __init__(self, pieces: Sequence[Piece], dtype: torch.dtype, place: torch.device) -> None:
        self.place = place
        self.bytes = message_bytes(pieces)
        """Bytes of a message, the same on every rank."""
        self._dtype = dtype
        self._exact = [piece for piece in pieces if piece.spec is None]

    def messages(self, rows: int) -> Tensor:
        """Return uninitialised memory for messages."""
        return torch.empty(rows, self.bytes, dtype=torch.uint8, device=self.place)

    def encode(
        self, shards: Tensor, messages: Tensor, streams: Streams, step: int, rank: int
    ) -> None:
        """Write this rank's messages to the rows in ``streams``; to others, only the exact parts.

        Args:
            streams: for each row, the number that distinguishes its noise from other messages of
                this step and rank.
        """
        for piece in self._exact:
            self._exact_part(piece, messages).copy_(shards[:, piece.elements])

    def decode(self, messages: Tensor, shards: Tensor) -> None:
        """Read messages into shards."""
        for piece in self._exact:
            shards[:, piece.elements] = self._exact_part(piece, messages)

    def sum(self, messages: Tensor, own_rank: int, own: Tensor, factor: float, out: Tensor) -> None:
        """Sum a shard over the ranks in rank order, in float32 at least.

        Args:
            messages: by rank; the row of ``own_rank`` is not read.
            own: shape (elements,), the uncoded addend of this rank.
            factor: factor by which the sum is multiplied.
            out: shape (elements,).
        """
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

    def _exact_part(self, piece: Piece, messages: Tensor) -> Tensor:
        """Return a view of an uncompressed piece in all messages, shape (rows, its elements)."""
        return messages[:, piece.bytes].view(self._dtype)


class HostCodec(ShardCodec):
    """A codec in host memory."""

    def __init__(
        self, pieces: Sequence[Piece], dtype: torch.dtype, seed: int, threads: int
    ) -> None:
        super().__init__(pieces, dtype, HOST)
        self._coded = [(piece, piece.spec) for piece in pieces if piece.spec is not None]
        self._seed = seed
        self._threads = threads

    def encode(
        self, shards: Tensor, messages: Tensor, streams: Streams, step: int, rank: int
    ) -> None:
        """See :meth:`ShardCodec.encode`."""
        super().encode(shards, messages, streams, step, rank)
        for row, stream in streams.items():
            for piece, spec in self._coded:
                _core.encode_into(
                    _array(shards[row, piece.elements]),
                    messages[row, piece.bytes].numpy(),
                    spec=spec,
                    seed=self._seed,
                    tensor=_noise_id(piece, stream),
                    step=step,
                    rank=rank,
                    dtype=name_of(self._dtype),
                    threads=self._threads,
                )

    def decode(self, messages: Tensor, shards: Tensor) -> None:
        """See :meth:`ShardCodec.decode`."""
        super().decode(messages, shards)
        for message, shard in zip(messages, shards, strict=True):
            for piece, spec in self._coded:
                _core.decode_into(
                    message[piece.bytes].numpy(),
                    _array(shard[piece.elements]),
                    spec=spec,
                    dtype=name_of(self._dtype),
                    threads=self._threads,
                )

    def sum(self, messages: Tensor, own_rank: int, own: Tensor, factor: float, out: Tensor) -> None:
        """See :meth:`ShardCodec.sum`."""
        super().sum(messages, own_rank, own, factor, out)
        for piece, spec in self._coded:
            total = torch.zeros(piece.count, dtype=torch.float32, device=HOST)
            for rank, message in enumerate(messages):
                if rank == own_rank:
                    total += own[piece.elements].float()
                    continue
                _core.decode_add_into(
                    message[piece.bytes].numpy(), total.numpy(), spec=spec, threads=self._threads
                )
            out[piece.elements] = total.mul_(factor)


class DeviceCodec(ShardCodec):
    """A codec in device memory, with one launch for all pieces of one code; the host never waits.

    Args:
        library: the file of the kernels.
    """

    def __init__(
        self,
        library: str,
        pieces: Sequence[Piece],
        dtype: torch.dtype,
        seed: int,
        place: torch.device,
    ) -> None:
        super().__init__(pieces, dtype, place)
        self._library = library
        self._seed = seed
        self._elements = pieces[-1].elements.stop if pieces else 0
        self._by_code = by_code((piece.spec, piece) for piece in pieces)
        self._placed: dict[tuple[tuple[int, int], ...], list[_Launch]] = {}

    def encode(
        self, shards: Tensor, messages: Tensor, streams: Streams, step: int, rank: int
    ) -> None:
        """See :meth:`ShardCodec.encode`."""
        super().encode(shards, messages, streams, step, rank)
        stream = current_stream_of(shards)
        for coder, table in self._launches(streams):
            coder.encode(
                shards.data_ptr(), table=table.data_ptr(), messages=messages.data_ptr(),
                step=step, rank=rank, stream=stream,
            )  # fmt: skip

    def decode(self, messages: Tensor, shards: Tensor) -> None:
        """See :meth:`ShardCodec.decode`."""
        super().decode(messages, shards)
        stream = current_stream_of(shards)
        for coder, table in self._launches(dict.fromkeys(range(len(messages)), 0)):
            coder.decode(
                messages.data_ptr(), table=table.data_ptr(), out=shards.data_ptr(), stream=stream
            )

    def sum(self, messages: Tensor, own_rank: int, own: Tensor, factor: float, out: Tensor) -> None:
        """See :meth:`ShardCodec.sum`."""
        super().sum(messages, own_rank, own, factor, out)
        stream = current_stream_of(out)
        for coder, table in self._launches({0: 0}):
            coder.sum(
                own.data_ptr(), table=table.data_ptr(), messages=messages.data_ptr(),
                stride=self.bytes, ranks=len(messages), own=own_rank, factor=factor,
                out=out.data_ptr(), stream=stream,
            )  # fmt: skip

    def _launches(self, streams: Streams) -> list[_Launch]:
        """Return the coders of these rows, one per code, each with its table on the device."""
        rows = tuple(streams.items())
        if rows not in self._placed:
            self._placed[rows] = [self._launch(*each, rows) for each in self._by_code]
        return self._placed[rows]

    def _launch(
        self, spec: _core.CodecSpec, same_code: Sequence[Piece], rows: Sequence[tuple[int, int]]
    ) -> _Launch:
        places = [
            (
                row * self._elements + piece.elements.start,
                piece.count,
                _noise_id(piece, stream),
                row * self.bytes + piece.bytes.start,
            )
            for row, stream in rows
            for piece in same_code
        ]
        coder = _core.GpuMessages(
            self._library, places, spec=spec, dtype=name_of(self._dtype), seed=self._seed
        )
        return coder, uploaded(coder.table(), self.place)


_Launch = tuple[_core.GpuMessages, Tensor]


def _noise_id(piece: Piece, stream: int) -> int:
    return (piece.id + stream) % 2**32


def _array(tensor: Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:  # not supported by numpy
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()
