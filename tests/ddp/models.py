"""Small models, data and steps that the tests of the hook share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsgd_hpc.torch.ddp import QSGDState, compress
from tests.ddp.ranks import here


def mlp(seed: int = 0) -> nn.Module:
    """Return a model with matrices above min_elements, and vectors."""
    torch.manual_seed(seed)
    layers = (nn.Linear(40, 100), nn.Tanh(), nn.Linear(100, 60), nn.Tanh(), nn.Linear(60, 9))
    return nn.Sequential(*layers).to(here())


def wrapped(
    group: dist.ProcessGroup,
    bits: int | None = 4,
    *,
    ddp: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[DistributedDataParallel, QSGDState]:
    """Return the model under DDP, in several buckets, with the hook."""
    options = {"bucket_cap_mb": 0.01, **(ddp or {})}
    model = DistributedDataParallel(mlp(), process_group=group, **options)
    return model, compress(model, bits, **settings)


def batch(rank: int, step: int, count: int = 8) -> torch.Tensor:
    """Return inputs that differ by rank and step."""
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(count, 40, generator=numbers).to(here())


def train(model: nn.Module, rank: int, steps: range, lr: float = 0.05) -> None:
    """Take steps of SGD with momentum towards small outputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


def bytes_of(model: nn.Module) -> bytes:
    """Return all parameters, bit by bit."""
    return b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())


def gradient(model: nn.Module) -> torch.Tensor:
    """Return all gradients in one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def exact_mean(group: dist.ProcessGroup, step: int) -> torch.Tensor:
    """Return what the average of all ranks' gradients of the initial model should be."""
    sums = 0
    for rank in range(group.size()):
        model = mlp()
        model(batch(rank, step)).square().mean().backward()
        sums = sums + gradient(model).double()
    return sums / group.size()
