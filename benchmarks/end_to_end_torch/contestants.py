"""Ways to average gradients over the ranks, each with a separate network."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tasks import Objective, Task
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import qsgd_hpc.torch as hvd
from qsgd_hpc.torch.ddp import compress

POWERSGD_RANKS = (1, 2)
POWERSGD_START = 2  # the first step that may be approximated, with error feedback
# One bucket, because the hook starts collectives from callbacks: with two buckets, ranks start them
# in different orders, and gloo aborts because of the sizes.
POWERSGD_BUCKET_MB = 1024

ALONE = "no exchange"


@dataclass
class Contestant:
    """A network in training, and its optimizer."""

    what: str
    model: nn.Module
    optimizer: Any
    is_ours: bool = False
    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    """Seconds of a step on this rank, one value per turn."""
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU seconds of all threads of this rank in a step, one value per turn."""
    losses: list[float] = field(default_factory=list)
    """Losses of this rank's batches."""
    wire_bytes: float | None = None
    """Bytes that this rank sends in a step; None if not counted."""

    def step(self, task: Objective, batch: tuple[Tensor, Tensor]) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        loss = task.loss(self.model, batch)
        loss.backward()
        if task.clip is None:
            self.optimizer.step()
        else:
            self._clipped_step(task.clip)
        self.losses.append(loss.item())
        self.steps += 1

    def _clipped_step(self, most: float) -> None:
        if not self.is_ours:
            nn.utils.clip_grad_norm_(self.model.parameters(), most)
            return self.optimizer.step()
        self.optimizer.synchronize()
        nn.utils.clip_grad_norm_(self.model.parameters(), most)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


def assemble(task: Task, wanted: list[str]) -> list[Contestant]:
    """Build the wanted contestants (all for an empty list) from the same weights."""
    torch.manual_seed(1)
    model = task.build()
    made = []
    for what, make in {**PEERS, **OURS}.items():
        if wanted and what not in wanted and what != ALONE:
            continue
        own = copy.deepcopy(model)
        sgd = torch.optim.SGD(own.parameters(), lr=task.rate, momentum=task.momentum)
        made.append(make(what, own, sgd))
    return made


Make = Callable[[str, nn.Module, torch.optim.Optimizer], Contestant]


def ddp(
    hook: Callable[[DistributedDataParallel], None] | None = None, bucket_mb: float | None = None
) -> Make:
    """Return a builder for torch's DDP over gloo, with a hook."""

    def make(what: str, model: nn.Module, sgd: torch.optim.Optimizer) -> Contestant:
        # No exchange of batch statistics, as with a distributed optimizer.
        wrapped = DistributedDataParallel(
            model,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_mb,
        )
        if hook is not None:
            hook(wrapped)
        return Contestant(what, wrapped, sgd)

    return make


def engine(compression: Any) -> Make:
    """Return a builder for a distributed optimizer."""

    def make(what: str, model: nn.Module, sgd: torch.optim.Optimizer) -> Contestant:
        optimizer = hvd.DistributedOptimizer(
            sgd, named_parameters=model.named_parameters(), compression=compression
        )
        return Contestant(what, model, optimizer, is_ours=True)

    return make


def fp16(model: DistributedDataParallel) -> None:
    """Send float16."""
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def bf16(model: DistributedDataParallel) -> None:
    """Send bfloat16, by torch's hook."""
    # Wrapped, because torch knows the hook by its name and accepts it on GPUs only.
    hook = default_hooks.bf16_compress_hook
    model.register_comm_hook(None, lambda group, bucket: hook(group, bucket))


def powersgd(rank: int) -> Callable[[DistributedDataParallel], None]:
    """Return a function that registers torch's PowerSGD as scripts do, with error feedback."""

    def register(model: DistributedDataParallel) -> None:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


def qsgd(bits: int) -> Callable[[DistributedDataParallel], None]:
    """Return a function that registers this package's hook."""

    def register(model: DistributedDataParallel) -> None:
        compress(model, bits)

    return register


PEERS: dict[str, Make] = {
    ALONE: Contestant,
    "gloo DDP fp32": ddp(),
    "gloo DDP fp16": ddp(fp16),
    **{
        f"gloo DDP PowerSGD {rank}": ddp(powersgd(rank), POWERSGD_BUCKET_MB)
        for rank in POWERSGD_RANKS
    },
}
OURS: dict[str, Make] = {
    "engine fp32": engine(hvd.Compression.none),
    "engine 8 bit": engine(hvd.Compression.qsgd(bits=8)),
    "engine 4 bit": engine(hvd.Compression.qsgd(bits=4)),
    "engine top 1%": engine(hvd.Compression.topk(ratio=0.01)),
    "engine top 0.2%": engine(hvd.Compression.topk(ratio=0.002)),
    "DDP hook 8 bit": ddp(qsgd(8)),
    "DDP hook 4 bit": ddp(qsgd(4)),
}
