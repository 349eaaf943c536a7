#!/usr/bin/env python3
"""Time the steps of a model of many small parameters; rank 0 prints the median in microseconds.

    qsgd-hpc run -np 2 benchmarks/small/step.py --by optimizer
    qsgd-hpc run -np 2 benchmarks/small/step.py --by ddp

The computation is negligible, so that a step's time is that of its gradients' reduction.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn


class Many(nn.Module):
    """Many vectors, concatenated and multiplied by weights."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList([torch.ones(elements) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum for weights of shape (count * elements,)."""
        return torch.cat(list(self.vectors)) @ x


def by_optimizer(model: nn.Module) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
    """Return the model and this package's optimizer."""
    import qsgd_hpc.torch as hvd

    hvd.init()
    inner = torch.optim.SGD(model.parameters(), 1e-3)
    return model, hvd.DistributedOptimizer(inner, model.named_parameters())


def by_ddp(model: nn.Module) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
    """Return the model in torch's DDP, over gloo."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return nn.parallel.DistributedDataParallel(model), torch.optim.SGD(model.parameters(), 1e-3)


def main() -> None:
    """Train, and print the median of the steps after the first tenth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--by", choices=["optimizer", "ddp"], default="optimizer")
    parser.add_argument("--count", type=int, default=300, help="parameters")
    parser.add_argument("--elements", type=int, default=256, help="of each, float32")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Many(options.count, options.elements)
    make = by_optimizer if options.by == "optimizer" else by_ddp
    forward, optimizer = make(model)
    x = torch.ones(options.count * options.elements)
    seconds = []
    for _ in range(options.steps):
        loss = forward(x)
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds[options.steps // 10 :])
    if options.by == "optimizer":
        import qsgd_hpc.torch as hvd

        first = hvd.rank() == 0
    else:
        first = torch.distributed.get_rank() == 0
        del forward, loss, model, optimizer
        torch.distributed.destroy_process_group()
    if first:
        print(f"{1e6 * median:.0f}", flush=True)


if __name__ == "__main__":
    main()
