"""Coders of the pieces of shards that have a code: on the host's processor, or by GPU kernels.

Both write the same bytes from the same noise, except that kernels leave headers empty. Shards have
shape (rows, elements), messages (rows, bytes); each row belongs to one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from qsgd_hpc import _core
from qsgd_hpc.torch._groups import HOST
from qsgd_hpc.torch._kernels import by_code, stream_of, uploaded
from qsgd_hpc.torch.fsdp.pieces import Piece, message_bytes
from qsgd_hpc.torch.ops._tensors import name_of

__all__ = ["Coder", "DeviceCoder", "HostCoder", "Streams"]

Streams = Mapping[int, int]
"""For each row to code, the number that distinguishes its noise from the other rows'."""


class Coder(Protocol):
    """A coder for one kind of memory."""

    def encode(
        self, shards: torch.Tensor, messages: torch.Tensor, streams: Streams, step: int, rank: int
    ) -> None:
        """Write the messages of this rank, to the rows in ``streams``."""

    def decode(self, messages: torch.Tensor, shards: torch.Tensor) -> None:
        """Decode all rows."""

    def sum(
        self,
        messages: torch.Tensor,
        own_rank: int,
        own: torch.Tensor,
        factor: float,
        out: torch.Tensor,
    ) -> None:
        """Sum a shard over the ranks in rank order, in float32, and multiply by ``factor``.

        Args:
            messages: by rank; the row of ``own_rank`` is not read.
            own: shape (elements,), the addend of this rank.
            out: shape (elements,).
        """


class HostCoder:
    """A coder in host memory."""

    def __init__(
        self, pieces: Sequence[Piece], dtype: torch.dtype, seed: int, threads: int
    ) -> None:
        self._pieces = [(piece, piece.spec) for piece in pieces if piece.spec is not None]
        self._dtype = name_of(dtype)
        self._seed = seed
        self._threads = threads

    def encode(
        self, shards: torch.Tensor, messages: torch.Tensor, streams: Streams, step: int, rank: int
    ) -> None:
        """See :meth:`Coder.encode`."""
        for row, stream in streams.items():
            for piece, spec in self._pieces:
                _core.encode_into(
                    _array(shards[row, piece.elements]),
                    messages[row, piece.bytes].numpy(),
                    spec=spec,
                    seed=self._seed,
                    tensor=_noise_id(piece, stream),
                    step=step,
                    rank=rank,
                    dtype=self._dtype,
                    threads=self._threads,
                )

    def decode(self, messages: torch.Tensor, shards: torch.Tensor) -> None:
        """See :meth:`Coder.decode`."""
        for message, shard in zip(messages, shards, strict=True):
            for piece, spec in self._pieces:
                _core.decode_into(
                    message[piece.bytes].numpy(),
                    _array(shard[piece.elements]),
                    spec=spec,
                    dtype=self._dtype,
                    threads=self._threads,
                )

    def sum(
        self,
        messages: torch.Tensor,
        own_rank: int,
        own: torch.Tensor,
        factor: float,
        out: torch.Tensor,
    ) -> None:
        """See :meth:`Coder.sum`."""
        for piece, spec in self._pieces:
            total = torch.zeros(piece.count, dtype=torch.float32, device=HOST)
            for rank, message in enumerate(messages):
                if rank == own_rank:
                    total += own[piece.elements].float()
                    continue
                _core.decode_add_into(
                    message[piece.bytes].numpy(), total.numpy(), spec=spec, threads=self._threads
                )
            out[piece.elements] = total.mul_(factor)


class DeviceCoder:
    """A coder in device memory, with one launch for all pieces of one code; the host never waits.

    Args:
        library: the file of the kernels.
        pieces: all pieces of a shard.
    """

    def __init__(
        self, library: str, pieces: Sequence[Piece], dtype: torch.dtype, seed: int
    ) -> None:
        self._library = library
        self._dtype = name_of(dtype)
        self._seed = seed
        self._stride = message_bytes(pieces)
        self._elements = pieces[-1].elements.stop if pieces else 0
        self._by_code = by_code((piece.spec, piece) for piece in pieces)
        self._placed: dict[tuple[tuple[int, int], ...], list[_Launch]] = {}

    def encode(
        self, shards: torch.Tensor, messages: torch.Tensor, streams: Streams, step: int, rank: int
    ) -> None:
        """See :meth:`Coder.encode`."""
        stream = stream_of(shards.device)
        for coder, table in self._launches(streams, shards.device):
            coder.encode(
                shards.data_ptr(), table=table.data_ptr(), messages=messages.data_ptr(),
                step=step, rank=rank, stream=stream,
            )  # fmt: skip

    def decode(self, messages: torch.Tensor, shards: torch.Tensor) -> None:
        """See :meth:`Coder.decode`."""
        rows = dict.fromkeys(range(len(messages)), 0)
        stream = stream_of(shards.device)
        for coder, table in self._launches(rows, shards.device):
            coder.decode(
                messages.data_ptr(), table=table.data_ptr(), out=shards.data_ptr(), stream=stream
            )

    def sum(
        self,
        messages: torch.Tensor,
        own_rank: int,
        own: torch.Tensor,
        factor: float,
        out: torch.Tensor,
    ) -> None:
        """See :meth:`Coder.sum`."""
        stream = stream_of(out.device)
        for coder, table in self._launches({0: 0}, out.device):
            coder.sum(
                own.data_ptr(), table=table.data_ptr(), messages=messages.data_ptr(),
                stride=self._stride, ranks=len(messages), own=own_rank, factor=factor,
                out=out.data_ptr(), stream=stream,
            )  # fmt: skip

    def _launches(self, streams: Streams, device: torch.device) -> list[_Launch]:
        """Return the coders of these rows, one per code, each with its table on the device."""
        rows = tuple(streams.items())
        if rows not in self._placed:
            self._placed[rows] = [
                self._launch(spec, same_code, rows, device) for spec, same_code in self._by_code
            ]
        return self._placed[rows]

    def _launch(
        self,
        spec: _core.CodecSpec,
        same_code: Sequence[Piece],
        rows: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> _Launch:
        places = [
            (
                row * self._elements + piece.elements.start,
                piece.count,
                _noise_id(piece, stream),
                row * self._stride + piece.bytes.start,
            )
            for row, stream in rows
            for piece in same_code
        ]
        coder = _core.GpuMessages(
            self._library, places, spec=spec, dtype=self._dtype, seed=self._seed
        )
        return coder, uploaded(coder.table(), device)


_Launch = tuple[_core.GpuMessages, torch.Tensor]


def _noise_id(piece: Piece, stream: int) -> int:
    return (piece.id + stream) % 2**32


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:  # not supported by numpy
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()
