"""Coding plan of one bucket: computed when its parameters are first seen, then reused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qsgd_hpc import _core
from qsgd_hpc._core import Coding
from qsgd_hpc.compression import Lossy
from qsgd_hpc.torch._distributed import HOST
from qsgd_hpc.torch.ddp.memory import Memory, Slot
from qsgd_hpc.torch.ops._tensors import name_of

__all__ = ["Place", "Plan", "Wave", "bucket_tensor", "gradients_of"]

# Elements of a message: one is coded while another is in flight.
WAVE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Place:
    """The position of this rank in the group, and the coding resources."""

    rank: int
    size: int
    seed: int
    workers: _core.Workers


@dataclass(frozen=True)
class Wave:
    """Memory of one exchange, uint8, and its parts for and from other ranks."""

    index: int
    sent: torch.Tensor
    received: torch.Tensor
    result: torch.Tensor
    results: torch.Tensor
    stride: int
    to: dict[int, torch.Tensor]
    """By rank: views of ``sent``, none of them empty."""
    of: dict[int, torch.Tensor]
    """By rank: views of ``received``."""
    results_of: dict[int, torch.Tensor]
    """By rank: views of ``results``."""


class Plan:
    """A bucket's coder with its slots and messages; parameters are contiguous in the bucket.

    Args:
        compression: None sends all gradients uncompressed.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        bucket: torch.Tensor,
        compression: Lossy | None,
        memory: Memory,
        place: Place,
    ) -> None:
        gradients = list(gradients_of(parameters, bucket.dtype, compression, memory, place))
        self.coder = _core.BucketCoder(
            [bucket_tensor(*gradient) for gradient in gradients],
            dtype=name_of(bucket.dtype),
            seed=place.seed,
            rank=place.rank,
            size=place.size,
            limit=WAVE_ELEMENTS,
            workers=place.workers,
        )
        self.pinned: dict[torch.Size, Any] = {}
        self._slots = [slot for slot, *_ in gradients]
        self.waves = [_wave(self.coder, index, place) for index in range(self.coder.waves)]

    def begin(self, bucket: torch.Tensor) -> None:
        """Use the bucket's memory, which must be on the host; counts a step."""
        self.coder.begin(bucket.data_ptr(), [slot.steps for slot in self._slots])
        for slot in self._slots:
            slot.steps += 1


def gradients_of(
    parameters: Sequence[torch.Tensor],
    dtype: torch.dtype,
    compression: Lossy | None,
    memory: Memory,
    place: Place,
    device: torch.device = HOST,
) -> Iterator[tuple[Slot, int, int, Coding | None]]:
    """Yield the slot, first element, size and coding of each gradient; allocates residuals."""
    at = 0
    for parameter in parameters:
        slot, count = memory.slot(parameter), parameter.numel()
        coding = None
        if compression is not None:
            coding = compression.coding_for_gradient(slot.name, parameter.shape, name_of(dtype))
        memory.allocate(slot, count, coding, rank=place.rank, size=place.size, device=device)
        yield slot, at, count, coding
        at += count


def bucket_tensor(slot: Slot, at: int, count: int, coding: Coding | None) -> _core.BucketTensor:
    """Return the core's description of a gradient that begins at element ``at`` of the bucket."""
    spec, residuals = None if coding is None else coding.spec, {}
    if spec is not None and slot.residual is not None and slot.owner_residual is not None:
        residuals["residual"] = slot.residual.data_ptr()
        residuals["owner_residual"] = slot.owner_residual.data_ptr()
    return _core.BucketTensor(at=at, count=count, id=slot.id, spec=spec, **residuals)


def _wave(coder: _core.BucketCoder, index: int, place: Place) -> Wave:
    sizes = [coder.bytes(index, owner) for owner in range(place.size)]
    others = [rank for rank in range(place.size) if rank != place.rank]
    own, stride = sizes[place.rank], max(sizes)
    sent = torch.zeros(sum(sizes) - own, dtype=torch.uint8, device=HOST)
    received = torch.zeros(own * len(others), dtype=torch.uint8, device=HOST)
    results = torch.zeros(stride * place.size, dtype=torch.uint8, device=HOST)
    return Wave(
        index,
        sent,
        received,
        results[place.rank * stride :][:own],
        results,
        stride,
        to=_parts(others, sent, [sizes[rank] for rank in others]),
        of=_parts(others, received, [own for _ in others]),
        results_of={r: results[r * stride :][: sizes[r]] for r in others if sizes[r] > 0},
    )


def _parts(ranks: Sequence[int], memory: torch.Tensor, sizes: list[int]) -> dict[int, torch.Tensor]:
    parts = zip(ranks, torch.split(memory, sizes), sizes, strict=True)  # type: ignore[no-untyped-call]
    return {rank: part for rank, part, size in parts if size > 0}
