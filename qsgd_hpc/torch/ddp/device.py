"""Averages of buckets that stay on the GPU: coded there, sent by the process group's collectives.

All work is queued on one stream, in the order of the buckets; the host never waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from qsgd_hpc import _core
from qsgd_hpc.compression import Lossy
from qsgd_hpc.torch._distributed import all_gather_single, by_code, uploaded
from qsgd_hpc.torch.ddp.host import future_for
from qsgd_hpc.torch.ddp.memory import Memory, Place, Slot, bucket_tensor, gradients_of
from qsgd_hpc.torch.ops._tensors import name_of

__all__ = ["DevicePlan", "Queue"]


class Queue:
    """A stream for a device's work, separate from the backward pass's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        stream: Any = torch.cuda.Stream
        self._stream = stream(device) if device.type == "cuda" else None

    @property
    def address(self) -> int:
        """Return the stream's address, for the kernels."""
        return 0 if self._stream is None else int(self._stream.cuda_stream)

    @contextlib.contextmanager
    def after_current(self, flat: torch.Tensor) -> Any:
        """Queue the work in the block after the current stream's work for ``flat``."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        flat.record_stream(self._stream)


class _Coded:
    """The tensors of a bucket that share a code, and their messages."""

    def __init__(self, coder: _core.GpuBucket, size: int, device: torch.device) -> None:
        self.coder = coder
        self.tables = [uploaded(table, device) for table in coder.tables()]
        # Zeros, so that the padding sent is the same on every rank.
        self.sent, self.received, self.results, self.result = (
            torch.zeros(messages * coder.stride, dtype=torch.uint8, device=device)
            for messages in (size, size, size, 1)
        )

    def average(self, flat: torch.Tensor, steps: torch.Tensor, group: Any, stream: int) -> None:
        to_send, to_sum, to_take = (table.data_ptr() for table in self.tables)
        later = steps.data_ptr()
        self.coder.encode(
            flat.data_ptr(), table=to_send, messages=self.sent.data_ptr(), later=later,
            stream=stream,
        )  # fmt: skip
        dist.all_to_all_single(self.received, self.sent, group=group)
        self.coder.reduce(
            flat.data_ptr(), table=to_sum, messages=self.received.data_ptr(),
            result=self.result.data_ptr(), later=later, stream=stream,
        )  # fmt: skip
        all_gather_single(self.results, self.result, group=group)
        self.coder.decode(
            self.results.data_ptr(), table=to_take, out=flat.data_ptr(), stream=stream
        )


class DevicePlan:
    """The averaging of one bucket, in which parameters are contiguous, and its memory.

    Args:
        compression: None sends all gradients uncompressed.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        flat: torch.Tensor,
        compression: Lossy | None,
        memory: Memory,
        place: Place,
        queue: Queue,
        library: str,
    ) -> None:
        self._size, self._queue = place.size, queue
        self._slots: list[Slot] = []
        exact: list[tuple[int, int]] = []
        to_code: list[tuple[_core.CodecSpec, _core.BucketTensor]] = []
        gradients = gradients_of(parameters, flat.dtype, compression, memory, place, flat.device)
        for slot, at, count, coding in gradients:
            if coding is None:
                exact.append((at, count))
            else:
                to_code.append((coding.spec, bucket_tensor(slot, at, count, coding)))
            self._slots.append(slot)
        self._exact = _joined(exact)
        """The first element and the number of elements of the uncompressed ranges."""
        own = {"seed": place.seed, "rank": place.rank, "size": place.size}
        coders = [
            _core.GpuBucket(library, tensors, dtype=name_of(flat.dtype), **own)
            for _, tensors in by_code(to_code)
        ]
        self._coded = [_Coded(coder, place.size, flat.device) for coder in coders]
        # Counted on the device, so that a captured graph draws new noise each time it is replayed.
        begun = max((slot.steps for slot in self._slots), default=0)
        self._steps = torch.full((1,), begun, dtype=torch.int32, device=flat.device)

    def start(self, flat: torch.Tensor, group: Any) -> torch.futures.Future[torch.Tensor]:
        """Queue the average of a bucket, in place; the future completes after it."""
        future = future_for(flat)
        for slot in self._slots:
            slot.steps += 1
        with self._queue.after_current(flat):
            for part in self._coded:
                part.average(flat, self._steps, group, self._queue.address)
            self._average_exactly(flat, group)
            self._steps.add_(1)
            future.set_result(flat)
        return future

    def count(self) -> None:
        """Update the slots' step counts, which lack replays of a captured graph.

        Waits for the device.
        """
        steps = int(self._steps)
        for slot in self._slots:
            slot.steps = max(slot.steps, steps)

    def _average_exactly(self, flat: torch.Tensor, group: Any) -> None:
        if not self._exact:
            return
        parts = [flat[at : at + count] for at, count in self._exact]
        wide = torch.promote_types(flat.dtype, torch.float32)  # 16 bits would lose precision
        packed = torch.cat(parts).to(wide)
        dist.all_reduce(packed, group=group)
        means = packed.div_(self._size).to(flat.dtype)
        sizes = [count for _, count in self._exact]
        torch._foreach_copy_(parts, list(means.split(sizes)))  # type: ignore[no-untyped-call]


def _joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of elements, with adjacent ones merged."""
    joined: list[tuple[int, int]] = []
    for at, count in runs:
        if joined and sum(joined[-1]) == at:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((at, count))
    return joined
