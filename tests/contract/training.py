"""What the tests of distributed training share."""

from __future__ import annotations

import pytest
import torch

import qsgd_hpc.torch as hvd


def needs_ranks(least):
    """Skip a test on fewer ranks; init() is harmless and has to come first."""
    hvd.init()
    return pytest.mark.skipif(hvd.size() < least, reason=f"needs {least} ranks or more")


def rows(shares, step, dtype=torch.float64):
    """Return inputs (4 per share, 6) and targets (4 per share, 3) of these ranks' shares."""
    parts = [torch.Generator().manual_seed(100 * step + share) for share in shares]
    x = torch.cat([torch.randn(4, 6, generator=g, dtype=dtype) for g in parts])
    return x, torch.stack([x.sum(1), x[:, 0], x[:, 1] * x[:, 2]], 1)


def replicas_are_identical(model):
    mine = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return torch.equal(mine, hvd.broadcast(mine, 0))


def linear(op=hvd.Sum, **arguments):
    """Return one layer of three weights, equal on all ranks, and its optimizer: SGD at 1."""
    model = torch.nn.Linear(3, 1, bias=False)
    hvd.broadcast_parameters(model.state_dict())
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, hvd.DistributedOptimizer(inner, model.named_parameters(), op=op, **arguments)


def loss_of(model):
    """Return a loss whose gradient is rank + 1 for each weight."""
    return model(torch.full((1, 3), hvd.rank() + 1.0)).sum()
