"""Averages of buckets in host memory, on separate threads, so that the backward pass continues.

A bucket's plan is computed when its parameters are first seen, then reused.

Three threads process the buckets in order: encode and start the scatter; wait for it, sum
and start the gather; wait for it and decode. Only one thread codes at a time. Both
kinds of exchange are tagged messages between pairs of ranks, which may interleave differently on
each rank, and with the collectives of the training: no further process group is needed. Tags are
numbered per process group in the order of the buckets, which DDP keeps the same on all ranks, since
several models may exchange buckets at once.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from qsgd_hpc import _core
from qsgd_hpc.compression import Lossy
from qsgd_hpc.torch._distributed import HOST
from qsgd_hpc.torch.ddp.memory import Memory, Place, bucket_tensor, gradients_of
from qsgd_hpc.torch.ops._tensors import name_of

__all__ = ["Pipeline", "Plan", "future_for", "staged"]

EXIT_S = 5.0
# Tags of messages: two kinds, and a number that is reused long after its message has arrived.
TAG = 0x51000000
TAGS = 1 << 16
_tags_of: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
# Elements of a message: one is coded while another is in flight.
WAVE_ELEMENTS = 1 << 20


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


def future_for(bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future that can complete with the bucket."""
    return torch.futures.Future(devices=None if bucket.is_cpu else [bucket.device])


class PinnedCopy:
    """A device's bucket on the host; copies run on a separate stream.

    Args:
        bucket: on a device with streams (CUDA's and ROCm's "cuda", Intel's "xpu"); the current
            stream computes its gradients.
        host: pinned memory of the same shape and type.
    """

    def __init__(self, bucket: torch.Tensor, host: torch.Tensor, stream: Any) -> None:
        self.host = host
        self._bucket = bucket
        self._stream = stream
        self._streams = torch.get_device_module(bucket.device)
        self._complete = self._streams.current_stream(bucket.device).record_event()

    def fetch(self) -> None:
        """Wait for the gradients and copy them to the host."""
        with self._streams.stream(self._stream):
            self._stream.wait_event(self._complete)
            self.host.copy_(self._bucket, non_blocking=True)
            self._bucket.record_stream(self._stream)
        self._stream.synchronize()

    def deliver(self, future: torch.futures.Future[torch.Tensor]) -> None:
        """Copy the result back and complete the future, which waits for the copy's stream."""
        with self._streams.stream(self._stream):
            self._bucket.copy_(self.host, non_blocking=True)
            future.set_result(self._bucket)


class InPlace:
    """A bucket that is already on the host."""

    def __init__(self, bucket: torch.Tensor) -> None:
        self.host = bucket

    def fetch(self) -> None:
        """Do nothing: the gradients are already on the host."""

    def deliver(self, future: torch.futures.Future[torch.Tensor]) -> None:
        """Complete the future."""
        future.set_result(self.host)


def staged(bucket: torch.Tensor, pinned: dict[torch.Size, Any]) -> InPlace | PinnedCopy:
    """Return the bucket's memory on the host.

    Args:
        pinned: the plan's pinned memory and stream, created at the first call.
    """
    if bucket.is_cpu:
        return InPlace(bucket)
    if bucket.shape not in pinned:
        host = torch.empty(bucket.shape, dtype=bucket.dtype, device=HOST, pin_memory=True)
        streams = torch.get_device_module(bucket.device)
        pinned[bucket.shape] = (host, streams.Stream(bucket.device))
    return PinnedCopy(bucket, *pinned[bucket.shape])


@dataclass
class Job:
    """A bucket in flight.

    Args:
        place: the bucket's memory on the host.
        future: completes with the bucket; ``fault`` contains an error, if any.
        tags: tags of the messages of each wave.
    """

    plan: Plan
    place: InPlace | PinnedCopy
    future: torch.futures.Future[torch.Tensor]
    tags: list[int]
    fault: BaseException | None = None

    def value(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        """Return the value of the completed future, or raise the fault, if any."""
        if self.fault is not None:
            raise self.fault
        return future.value()

    def end(self) -> None:
        """Complete the future."""
        if self.fault is None:
            self.place.deliver(self.future)
        else:
            self.future.set_result(self.place.host)


@dataclass
class _Step:
    """One wave of a job, with its messages in flight."""

    job: Job
    wave: Wave
    tag: int
    sends: list[Any] = field(default_factory=list)
    receives: list[Any] = field(default_factory=list)

    def wait(self) -> None:
        """Wait for the expected messages."""
        for work in self.receives:
            work.wait()
        self.receives.clear()


class Pipeline:
    """The threads, which exchange messages over a group that supports host memory.

    The threads end when it is deleted.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._tags = _tags_of.setdefault(group, itertools.cycle(range(TAG, TAG + 2 * TAGS, 2)))
        self._stages = _Stages(group)
        weakref.finalize(self, self._stages.close)

    def submit(
        self, plan: Plan, place: InPlace | PinnedCopy, future: torch.futures.Future[torch.Tensor]
    ) -> torch.futures.Future[torch.Tensor]:
        """Queue a bucket; the returned future completes when the bucket holds the average."""
        job = Job(plan, place, future, [next(self._tags) for _ in plan.waves])
        result = future.then(job.value)
        self._stages.jobs.put(job)
        return result

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that this rank has sent."""
        return sum(self._stages.sent_bytes.values())

    @property
    def coding_s(self) -> float:
        """Seconds for which this rank has encoded, added and decoded."""
        return self._stages.coding_s


class _Stages:
    # Must not refer to the Pipeline, whose finalizer ends the threads.
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._scattered: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._gathered: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._lock = threading.Lock()  # a plan's coder and the workers are not thread-safe
        self.coding_s = 0.0
        self._fault: BaseException | None = None
        self.sent_bytes: dict[int, int] = {}  # by thread, so that no lock is needed
        self._threads = [
            _started(self.jobs, self._scatter, self._scattered),
            _started(self._scattered, self._gather, self._gathered),
            _started(self._gathered, self._finish, None),
        ]

    def close(self) -> None:
        """End the threads after their current work."""
        self.jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(EXIT_S)

    def _scatter(self, job: Job) -> None:
        self._guarded(job, lambda: self._begin(job))
        for wave, tag in zip(job.plan.waves, job.tags, strict=True):
            step = _Step(job, wave, tag)
            self._guarded(job, lambda step=step: self._encode(step))  # type: ignore[misc]
            self._scattered.put(step)
        if not job.plan.waves:
            job.end()

    def _gather(self, step: _Step) -> None:
        self._guarded(step.job, lambda: self._reduce(step))
        self._gathered.put(step)

    def _finish(self, step: _Step) -> None:
        self._guarded(step.job, lambda: self._decode(step))
        if step.wave is step.job.plan.waves[-1]:  # each thread processes the waves in order
            step.job.end()

    def _guarded(self, job: Job, act: Callable[[], None]) -> None:
        # After a failure, ranks may disagree on the next message: exchange nothing more.
        job.fault = job.fault or self._fault
        if job.fault is not None:
            return
        try:
            act()
        except BaseException as fault:
            self._fault = job.fault = fault

    @contextlib.contextmanager
    def _coding(self) -> Iterator[None]:
        with self._lock:
            begin_s = time.perf_counter()
            yield
            self.coding_s += time.perf_counter() - begin_s

    def _begin(self, job: Job) -> None:
        job.place.fetch()
        job.plan.begin(job.place.host)

    def _encode(self, step: _Step) -> None:
        wave = step.wave
        with self._coding():
            step.job.plan.coder.encode(wave.index, wave.sent.data_ptr())
        self._exchange(step, step.tag, wave.to, wave.of)

    def _reduce(self, step: _Step) -> None:
        step.wait()
        wave, own = step.wave, step.wave.result
        with self._coding():
            step.job.plan.coder.reduce(wave.index, wave.received.data_ptr(), own.data_ptr())
        everyone = range(len(self._ranks)) if own.numel() > 0 else ()
        others = {rank: own for rank in everyone if self._ranks[rank] != dist.get_rank()}
        self._exchange(step, step.tag + 1, others, wave.results_of)

    def _decode(self, step: _Step) -> None:
        step.wait()
        wave = step.wave
        with self._coding():
            step.job.plan.coder.decode(wave.index, wave.results.data_ptr(), wave.stride)
        for work in step.sends:  # their memory is reused in the next step
            work.wait()

    def _exchange(
        self, step: _Step, tag: int, to: dict[int, torch.Tensor], of: dict[int, torch.Tensor]
    ) -> None:
        for rank, message in of.items():
            source = self._ranks[rank]
            step.receives.append(dist.irecv(message, source, group=self._group, tag=tag))
        for rank, message in to.items():
            target = self._ranks[rank]
            step.sends.append(dist.isend(message, target, group=self._group, tag=tag))
        own = threading.get_ident()
        sent = sum(message.nbytes for message in to.values())
        self.sent_bytes[own] = self.sent_bytes.get(own, 0) + sent


def _started(inbox: Any, act: Callable[[Any], None], then: Any) -> threading.Thread:
    def serve() -> None:
        while (item := inbox.get()) is not None:
            act(item)
        if then is not None:
            then.put(None)

    thread = threading.Thread(target=serve, name=f"qsgd-ddp{act.__name__}", daemon=True)
    thread.start()
    return thread
