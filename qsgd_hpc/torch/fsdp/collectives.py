"""The two collectives of FSDP2 with codes, and the times of all, for a scaling study."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# torch has no public name for these types of arguments of its public methods.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from qsgd_hpc.compression import FLOATING, Lossy
from qsgd_hpc.errors import UsageError
from qsgd_hpc.rules import PLAIN_BITS
from qsgd_hpc.torch._distributed import (
    HOST,
    all_gather_single,
    reduce_scatter_single,
    say,
    serves,
    why_on_host,
    why_unsupported,
)
from qsgd_hpc.torch.fsdp.codec import DeviceCodec, HostCodec, ShardCodec
from qsgd_hpc.torch.fsdp.layout import (
    Part,
    before_first_gathering,
    param_groups,
    pieces_of,
    sharded_modules,
)
from qsgd_hpc.torch.ops._tensors import name_of

__all__ = ["QSGDAllGather", "QSGDReduceScatter", "ShardedModule", "Traffic", "time_shards"]

WEIGHTS = 1 << 31
"""The noise stream of weights; the stream of gradients is the number of the receiving rank."""


@dataclass
class Traffic:
    """Bytes that this rank has sent."""

    sent: int = 0
    uncoded: int = 0
    """Bytes that the same calls would have sent without codes."""

    def count(self, messages: int, coded: int, uncoded: int) -> None:
        """Count messages of the given sizes in bytes."""
        self.sent += messages * coded
        self.uncoded += messages * uncoded


@dataclass
class ShardedModule:
    """State shared by the two collectives of one FSDPModule.

    Args:
        name: name of the module.
        parts: its parameters (:func:`qsgd_hpc.torch.fsdp.layout.parts_of`).
        rank: this rank's number among those whose gradients are averaged; it keys the noise. The
            replicas of HSDP have different numbers, because their errors would be equal with equal
            noise. The ranks of tensor parallelism have the same: they must keep equal copies of
            parameters that are not split.
        seed: seed of the rounding noise, equal on every rank.
        threads: number of threads that code a shard.
    """

    name: str
    parts: tuple[Part, ...]
    rank: int
    seed: int
    threads: int
    shards: int = 1
    """Number of ranks over which its parameters are sharded."""
    steps: int = 0
    """Number of gradient reductions. It is also the step of the weights' noise: their codes do not
    change within a step, so the backward pass uses the same weights as its forward pass."""
    _codecs: dict[tuple[Any, ...], ShardCodec] = field(default_factory=dict)

    @property
    def trained(self) -> tuple[Part, ...]:
        """The parts that currently require a gradient; FSDP2 reduces no others."""
        return tuple(part for part in self.parts if part.trains)

    def codec(
        self,
        shard: torch.Tensor,
        group: dist.ProcessGroup,
        compression: Lossy,
        parts: tuple[Part, ...],
    ) -> ShardCodec:
        """Return the codec for shards of this kind, which have these parts."""
        count, dtype, device, ranks = shard.numel(), shard.dtype, shard.device, group.size()
        key = (count, dtype, device, ranks, compression, parts)
        if key in self._codecs:
            return self._codecs[key]
        pieces = pieces_of(parts, self.name, compression, count, ranks, dtype)
        codec: ShardCodec
        if (library := serves(device, compression, group)) is not None:
            codec = DeviceCodec(library, pieces, dtype, self.seed, device)
        else:
            if device != HOST:
                _report(device, why_on_host(device, compression, group))
            codec = HostCodec(pieces, dtype, self.seed, self.threads)
        self._codecs[key] = codec
        return codec


@functools.cache
def _report(device: torch.device, reason: str | None) -> None:
    """Print the reason; cached, so that it is printed once, not for each module."""
    say(f"FSDP2's shards on {device} are coded in host memory: {reason}")


class _Coded:
    """Base of both collectives of a module; allocates memory as torch's own collectives do.

    Args:
        compression: None sends uncompressed.
    """

    def __init__(self, module: ShardedModule, compression: Lossy | None) -> None:
        self._module = module
        self.compression = compression
        self.traffic = Traffic()

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for input and output."""
        return torch.empty(*size, dtype=dtype, device=device)


class QSGDReduceScatter(_Coded, ReduceScatter):
    """Sum or average of gradients; every rank sends each owner its codes of the owner's shard."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce and wait for the result; on a GPU that codes, queue it on the current stream.

        Args:
            output_tensor: shape (elements of a shard,), floating, on any device.
            input_tensor: shape (ranks * elements of a shard,), of the same type.
        Raises:
            UsageError: an operation other than sum, average and a sum times a factor.
        """
        if self.compression is None or name_of(input_tensor.dtype) not in FLOATING:
            reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)
            self._count(output_tensor, _bytes(output_tensor), group)
        else:
            self._reduce(output_tensor, input_tensor, group, op)
        self._module.steps += 1

    def _count(self, shard: torch.Tensor, coded_bytes: int, group: dist.ProcessGroup) -> None:
        self.traffic.count(group.size() - 1, coded_bytes, _bytes(shard))

    def _reduce(
        self, output: torch.Tensor, gradients: torch.Tensor, group: dist.ProcessGroup, op: Any
    ) -> None:
        ranks, me = group.size(), group.rank()
        factor = self._factor(op, ranks)
        assert self.compression is not None
        codec = self._module.codec(output, group, self.compression, self._module.trained)
        shards = gradients.detach().view(ranks, -1).to(codec.place)
        sent = codec.messages(ranks)
        others = {rank: rank for rank in range(ranks) if rank != me}
        codec.encode(shards, sent, others, self._module.steps, self._module.rank)
        received = _exchange(sent, gradients.device, group)
        with _placed(output, codec.place) as total:
            codec.sum(received, me, shards[me], factor, total)
        self._count(output, codec.bytes, group)

    def _factor(self, op: Any, ranks: int) -> float:
        """Return what an operation multiplies the sum by."""
        if op == dist.ReduceOp.SUM:
            return 1.0
        if op == dist.ReduceOp.AVG:
            return 1 / ranks
        if op == dist.ReduceOp.PREMUL_SUM:  # of set_gradient_divide_factor()
            _, factor = op.__getstate__()
            return float(factor)
        raise UsageError(
            f"module {self._module.name!r}: FSDP2 requested {op}, but coded gradients can only be "
            "summed or averaged; remove gradient_bits, or --bits"
        )


class QSGDAllGather(_Coded, AllGather):
    """Gather of coded weights; every rank also decodes its own shard, so that all ranks agree.

    The optimizer's shards remain exact.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather all ranks' shards.

        Args:
            output_tensor: shape (ranks * elements of a shard,), on any device.
            input_tensor: shape (elements of a shard,), of the same type.
        Returns:
            with ``async_op`` a work object, else None.
        """
        others = group.size() - 1
        # Other types are the bytes of float8 weights.
        # A smaller group (reshard_after_forward=N) gathers weights that have been decoded: another
        # code would make them differ from those of the forward pass.
        compression = self.compression if group.size() >= self._module.shards else None
        if compression is None or name_of(input_tensor.dtype) not in FLOATING:
            self.traffic.count(others, _bytes(input_tensor), _bytes(input_tensor))
            work: dist.Work | None = all_gather_single(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
            return work
        codec = self._module.codec(input_tensor, group, compression, self._module.parts)
        mine, shard = codec.messages(1), input_tensor.view(1, -1).to(codec.place)
        codec.encode(shard, mine, {0: WEIGHTS}, self._module.steps, group.rank())
        to_send = mine.to(_transport_device(mine, input_tensor.device, group))
        messages = to_send.new_empty(group.size(), codec.bytes)
        self.traffic.count(others, codec.bytes, _bytes(input_tensor))
        work = all_gather_single(messages, to_send, group=group, async_op=async_op)
        finish = functools.partial(_decode, codec, messages, output_tensor)
        if work is None:
            finish()
            return None
        return _Gathering(work, finish)


def _decode(codec: ShardCodec, messages: torch.Tensor, output: torch.Tensor) -> None:
    """Decode all ranks' messages into the memory of FSDP2."""
    with _placed(output, codec.place) as shards:
        codec.decode(messages.to(codec.place), shards.view(len(messages), -1))


class _Gathering(dist.Work):
    """A gather in flight; ``wait`` decodes it."""

    def __init__(self, work: dist.Work, finish: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the messages and decode them."""
        done = self._work.wait(timeout)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return bool(done)


def _exchange(sent: torch.Tensor, device: torch.device, group: dist.ProcessGroup) -> torch.Tensor:
    """Send each rank its row of ``sent``; return the received rows, in the same memory."""
    moved = sent.to(_transport_device(sent, device, group))
    received = torch.empty_like(moved)
    dist.all_to_all_single(received, moved, group=group)
    return received.to(sent.device)


def _transport_device(
    messages: torch.Tensor, device: torch.device, group: dist.ProcessGroup
) -> torch.device:
    """Return the memory that the group supports: that of the messages, or the shards' device."""
    return messages.device if why_unsupported(group, messages.device) is None else device


@contextlib.contextmanager
def _placed(output: torch.Tensor, place: torch.device) -> Iterator[torch.Tensor]:
    """Yield memory on ``place`` that is then copied to ``output``; ``output`` if it is there."""
    if output.device == place:
        yield output
        return
    moved = torch.empty_like(output, device=place)
    yield moved
    output.copy_(moved)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


Note = Callable[[float, int, int, int | None], None]
_KNOWN = (DefaultAllGather, DefaultReduceScatter, QSGDAllGather, QSGDReduceScatter)


class _Timed:
    """A collective that reports the duration of each of its calls."""

    def __init__(self, collective: Any, note: Note) -> None:
        self.allocate = collective.allocate
        self._collective = collective
        self._reduces = isinstance(collective, (DefaultReduceScatter, QSGDReduceScatter))
        self._note = note
        compression = getattr(collective, "compression", None)
        self._bits = PLAIN_BITS if compression is None else compression.bits

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        traffic = getattr(self._collective, "traffic", None)  # of coded collectives
        before = traffic.sent if traffic else 0
        begin_s = time.perf_counter()
        result = self._collective(output_tensor, input_tensor, *args, **kwargs)
        if output_tensor.is_cpu:
            seconds = time.perf_counter() - begin_s
            # The larger tensor has all ranks' shards, the smaller only this rank's.
            others = abs(output_tensor.nbytes - input_tensor.nbytes)
            sent = traffic.sent - before if traffic else others
            self._note(seconds, sent, input_tensor.nbytes if self._reduces else 0, self._bits)
        return result


def time_shards(module: Any, note: Note) -> None:
    """Report the durations of the collectives of an outermost module and the modules in it.

    In host memory, they run when they are called, and nothing is computed meanwhile. On a device,
    they are queued, and the host cannot measure when they run.

    Args:
        module: a module that ``fully_shard`` was called on.
        note: called after each collective with its seconds, the bytes that this rank has sent to
            others, the bytes of gradients that it has reduced, and the bits per element.
    """

    def replace(module: Any) -> None:
        for each in sharded_modules(module).values():
            for group in param_groups(each):
                for name in ("_all_gather_comm", "_reduce_scatter_comm"):
                    collective = getattr(group, name)
                    if isinstance(collective, _KNOWN):
                        setattr(group, name, _Timed(collective, note))

    before_first_gathering(module, replace)
