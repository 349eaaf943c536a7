"""What the torch workloads share: the start, the optimizer, and the training of image networks."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import images
import numpy as np
import options
import torch
import torch.nn.functional as F
import training
from data import check_batch, prefetch, shards, shared
from torch import Tensor, nn
from training import Recipe

import qsgd_hpc.torch as hvd
from qsgd_hpc.scaling import Meter

say = partial(training.say, hvd)
report = partial(training.report, hvd)
conclude = partial(training.conclude, hvd)
run = partial(training.run, hvd)


def start(args: argparse.Namespace) -> torch.device:
    """Join the job, take a GPU if there is one, and let all ranks draw the same weights."""
    options.apply_algorithm(args)
    hvd.init()
    torch.manual_seed(args.seed)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def distribute(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer
) -> torch.optim.Optimizer:
    """Average gradients over the ranks, in the bits asked for, and begin alike on all."""
    compression = None  # then QSGD_BITS decides
    if args.bits:
        compression = hvd.Compression.none if args.bits == 32 else hvd.Compression.qsgd(args.bits)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    torch.manual_seed(args.seed + 1 + hvd.rank())  # dropout and shifts differ from here on
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def parameters(model: nn.Module) -> int:
    """Return how many numbers the model learns."""
    return sum(p.numel() for p in model.parameters())


def total(*values: float) -> list[float]:
    """Return each value summed over the ranks."""
    sums: list[float] = hvd.allreduce(
        torch.tensor(values, dtype=torch.float64), op=hvd.Sum
    ).tolist()
    return sums


def to_floats(pixels: Tensor) -> Tensor:
    """Turn bytes, shape (n, size, size, channels), into floats around zero, channels first."""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def augment(x: Tensor) -> Tensor:
    """Shift the whole batch by up to an eighth, and mirror it half of the time."""
    size, reach = x.shape[-1], x.shape[-1] // 8
    down, right = torch.randint(0, 2 * reach + 1, (2,)).tolist()
    x = F.pad(x, (reach,) * 4)[:, :, down : down + size, right : right + size]
    return x.flip(3) if torch.rand(()) < 0.5 else x


def batches(
    source: images.Images, chosen: Iterable[Any], device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images and labels on the device, read ahead by a thread."""
    for pixels, labels in prefetch(source.take(each) for each in chosen):
        yield torch.from_numpy(pixels).to(device), torch.from_numpy(labels).to(device)


def accuracy(model: nn.Module, test: images.Images, device: torch.device) -> float:
    """Return the share of images that the model labels rightly; each rank tests its share."""
    model.eval()
    for name, buffer in model.named_buffers():  # batch norm's statistics, which no gradient evens
        if buffer.is_floating_point():
            hvd.allreduce_(buffer, name=f"buffer.{name}")
    mine = np.arange(hvd.rank(), len(test), hvd.size())
    chosen = (mine[begin : begin + 250] for begin in range(0, len(mine), 250))
    right = 0
    with torch.no_grad():
        for x, y in batches(test, chosen, device):
            right += int((model(to_floats(x)).argmax(1) == y).sum())
    (all_right,) = total(right)
    return all_right / len(test)


def train_images(
    args: argparse.Namespace,
    recipe: Recipe,
    read: Callable[[], images.DataSet],
    build: Callable[[int, int], nn.Module],
) -> None:
    """Train a network that labels images, and record how.

    Args:
        args: the options of options.parser.
        recipe: how it learns.
        read: returns the data; called on rank 0.
        build: takes the number of classes and the images' side, returns the network.
    """
    device = start(args)
    rank, ranks = hvd.rank(), hvd.size()
    data = shared(read, hvd)
    batch = options.global_batch(args, ranks)
    steps_per_epoch = check_batch(batch, len(data.train), ranks)
    steps = options.total_steps(args, steps_per_epoch)
    epochs = math.ceil(steps / steps_per_epoch)
    test = data.test.first(steps * batch)  # a few steps are not worth a long test

    size = data.train.size
    model = build(data.classes, size).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(),
        lr=recipe.rate,
        momentum=recipe.momentum,
        nesterov=True,
        weight_decay=recipe.weight_decay,
    )
    optimizer = distribute(args, model, optimizer)
    say(
        f"{data.name}: {len(data.train)} images of {size} x {size} pixels, {data.classes} classes; "
        f"{parameters(model):,} parameters; batch {batch} on {ranks} rank(s)"
    )

    meter = Meter(
        hvd, global_batch_size=batch, unit="images", dataset=data.name, test_samples=len(test)
    )
    step = 0
    for epoch in range(epochs):
        model.train()
        loss_sum, first = torch.zeros((), device=device), step
        chosen = shards(len(data.train), batch, rank=rank, ranks=ranks, seed=args.seed + epoch)
        for x, y in meter.steps(batches(data.train, islice(chosen, steps - step), device)):
            set_rate(optimizer, options.learning_rate(step, steps, recipe.peak(batch)))
            optimizer.zero_grad()
            x = to_floats(x)
            scores = model(augment(x) if recipe.augment else x)
            # Divided by a rank's fair share of the batch, not by its own count, which may be one
            # less or more: the mean over the ranks is then the batch's mean.
            loss = loss_of(scores, y) / (batch / ranks)
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
            if device.type == "cuda":
                torch.cuda.synchronize()  # else a step would end before its work has
            step += 1
        results = {"train_loss": loss_sum.item() / max(1, step - first)}
        if not args.no_eval:
            results["test_accuracy"] = accuracy(model, test, device)
        report(meter.epoch(**results), epochs, "test_accuracy")
    conclude(meter.final(parameters=parameters(model)))


def loss_of(scores: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Return the summed cross entropy; Inception's second output counts with 0.4."""
    if isinstance(scores, Tensor):
        return F.cross_entropy(scores, labels, reduction="sum")
    return loss_of(scores[0], labels) + 0.4 * loss_of(scores[1], labels)
