"""Training of one contestant, and its row of the table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from codes import Contestant
from tasks import Task, resnet_lesson
from torch import Tensor, nn

import qsgd_hpc.torch as hvd

__all__ = ["train"]

LAST_LOSSES = 50  # batches whose mean is the final loss


def train(
    contestant: Contestant, task: Task, device: torch.device, *, epochs: int, seed: int
) -> dict[str, Any]:
    """Train from the same weights on the same batches as all others; return a row; collective.

    The engine is restarted for each: its residuals and its noise depend on the names of gradients,
    which are the same in every training.
    """
    hvd.shutdown()
    hvd.init()
    seed += contestant.later
    torch.manual_seed(seed)
    model = task.build().to(device)
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, weight_decay=5e-4)
    optimizer = hvd.DistributedOptimizer(
        sgd, named_parameters=model.named_parameters(), compression=_compression(contestant)
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    torch.manual_seed(seed * 1000 + hvd.rank())  # ranks augment their images differently
    row = {
        "what": contestant.name,
        "code": contestant.code.name,
        "error_feedback": contestant.error_feedback,
        **_optimize(model, optimizer, task, device, epochs, seed),
        "nmse": _mean_nmse(),
        "test_accuracy": _test(model, task, device),
    }
    return row


def _compression(contestant: Contestant) -> Any:
    choice = getattr(hvd.Compression, contestant.code.kind)
    return choice(**contestant.settings) if contestant.code.feeds_back else choice


def _optimize(
    model: nn.Module, optimizer: Any, task: Task, device: torch.device, epochs: int, seed: int
) -> dict[str, Any]:
    """Do all steps. A non-finite gradient, which is the same on all ranks, ends them early."""
    size = task.batch * hvd.size()
    steps = epochs * (len(task.images.x_train) // size)
    peak = task.peak * size / task.reference_batch
    losses: list[float] = []
    sent_before = hvd.communication_stats()["wire_bytes"]
    model.train()
    for step, (x, y) in enumerate(_batches(task, epochs, seed)):
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate(step, steps, peak)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(task.prepare(x.to(device))), y.to(device))
        loss.backward()
        try:
            optimizer.step()
        except hvd.NonFiniteGradientError:
            break
        losses.append(loss.item())
    sent = hvd.communication_stats()["wire_bytes"] - sent_before
    last = losses[-LAST_LOSSES:]
    return {
        "steps": len(losses),
        "diverged": len(losses) < steps,
        "wire_bytes": _mean(sent / max(1, len(losses))),
        "loss": _mean(sum(last) / len(last)) if last else None,
    }


def _batches(task: Task, epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of each batch; an incomplete last batch is left out."""
    size, images = task.batch * hvd.size(), task.images
    count = len(images.x_train)
    for epoch in range(epochs):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))
        for batch in order[: count // size * size].split(size):
            mine = batch[hvd.rank() :: hvd.size()]
            yield images.x_train[mine], images.y_train[mine]


def _mean_nmse() -> float | None:
    """Return the mean NMSE of this training's codes over its steps, elements and ranks."""
    coded = [q for q in hvd.compression_stats().values() if q["coding"] != "none"]
    elements = sum(q["elements"] for q in coded)
    if not elements:
        return None
    return _mean(sum(q["mean_nmse"] * q["elements"] for q in coded) / elements)


def _test(model: nn.Module, task: Task, device: torch.device) -> float:
    """Return the accuracy on all test images; collective."""
    resnet_lesson.average_buffers(model)
    rank, ranks = hvd.rank(), hvd.size()
    images = task.images
    x, y = (each[rank::ranks].to(device) for each in (images.x_test, images.y_test))
    return _mean(task.count_correct(model, x, y)) * ranks / len(task.images.x_test)


def _mean(value: float) -> float:
    mean: float = hvd.allreduce(torch.tensor(value, dtype=torch.float64)).item()
    return mean
