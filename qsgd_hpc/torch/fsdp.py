"""Compressed gradients for FSDP2: a reduce-scatter that exchanges codes.

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(QSGDReduceScatter(bits=8))

Each rank sends every other one its codes of that rank's shard, in one direct exchange, and sums
what it gets in rank order with its own part uncoded. docs/ddp.md says what FSDP2 leaves out of
reach.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# torch has no public name for the base class of what its public method takes.
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from qsgd_hpc import _core, env
from qsgd_hpc.compression import FLOATING, Qsgd
from qsgd_hpc.errors import UsageError
from qsgd_hpc.torch.ops._tensors import name_of

__all__ = ["QSGDReduceScatter"]

HEADER_BYTES = 32


class QSGDReduceScatter(ReduceScatter):
    """One module's reduce-scatter; give each FSDPModule its own.

    Args:
        bits: per element, sign included, 2 to 8. One bit needs error feedback, which would take a
            float32 copy of the unsharded gradients on every rank: there is none here.
        seed: of the rounding noise, equal on every rank; None takes QSGD_SEED.
        name: tells modules' noise apart where they share a seed.
        **settings: ``bucket_size``, ``norm``, ``min_elements`` (of a whole module) and so on, as
            for :class:`qsgd_hpc.torch.ddp.QSGDState`.
    Raises:
        UsageError: a setting that is out of range.
    """

    def __init__(
        self, bits: int = 8, *, seed: int | None = None, name: str = "", **settings: Any
    ) -> None:
        if bits == 1:
            raise UsageError("QSGDReduceScatter(bits=1) needs error feedback; choose 2 to 8")
        given: dict[str, Any] = {**settings, "bits": bits}
        self.compression = Qsgd(error_feedback=False, nmse_budget=None, **given)
        self.compression.require_fixed_length("QSGDReduceScatter")
        self.seed = env.get("QSGD_SEED") if seed is None else seed
        self.steps = 0
        self._id = zlib.crc32(name.encode())

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum or average the ranks' inputs; this rank's shard of the result goes to the output.

        Args:
            output_tensor: shape (elements of a shard,), floating, on any device.
            input_tensor: shape (ranks * elements of a shard,), of the same type.
        Raises:
            UsageError: an operation other than sum and average, or a type that is not floating.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UsageError(f"QSGDReduceScatter sums and averages; FSDP2 asked for {op}")
        element = name_of(input_tensor.dtype)
        if element not in FLOATING:
            raise UsageError(f"QSGDReduceScatter: gradients of {element} cannot be coded")
        ranks = dist.get_process_group_ranks(group)
        shards = input_tensor.detach().to("cpu", torch.float32).chunk(len(ranks))
        total = self._sum(shards, ranks, group, exact=self._is_small(input_tensor))
        if op == dist.ReduceOp.AVG:
            total /= len(ranks)
        output_tensor.copy_(total)
        self.steps += 1

    def _is_small(self, gradients: torch.Tensor) -> bool:
        return gradients.numel() < self.compression.min_elements

    def _sum(
        self, shards: Sequence[torch.Tensor], ranks: list[int], group: Any, *, exact: bool
    ) -> torch.Tensor:
        me, count = dist.get_rank(group), shards[0].numel()
        spec = self.compression.coding().spec
        coded_bytes = HEADER_BYTES + spec.bytes(count)
        incoming: dict[int, torch.Tensor] = {}
        outgoing: list[torch.Tensor] = []
        works: list[Any] = []
        for rank, peer in enumerate(ranks):
            if rank != me:
                incoming[rank] = torch.empty(count * 4 if exact else coded_bytes, dtype=torch.uint8)
                works.append(dist.irecv(incoming[rank], peer, group=group))
        for rank, peer in enumerate(ranks):
            if rank != me:
                outgoing.append(self._message(shards[rank], rank, me, spec, coded_bytes, exact))
                works.append(dist.isend(outgoing[-1], peer, group=group))
        for work in works:
            work.wait()
        total = torch.zeros(count)
        for rank in range(len(ranks)):
            if rank == me:
                total += shards[me]
            elif exact:
                total += incoming[rank].view(torch.float32)
            else:
                _core.decode_add_into(incoming[rank].numpy(), total.numpy(), spec=spec)
        return total

    def _message(
        self, shard: torch.Tensor, owner: int, rank: int, spec: Any, size_bytes: int, exact: bool
    ) -> torch.Tensor:
        if exact:
            return shard.contiguous().view(torch.uint8)
        message = torch.empty(size_bytes, dtype=torch.uint8)
        _core.encode_into(
            shard.numpy(),
            message.numpy(),
            spec=spec,
            seed=self.seed,
            tensor=(self._id + owner) % 2**32,
            step=self.steps,
            rank=rank,
        )
        return message
