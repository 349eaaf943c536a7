"""What training is in every framework: how fast a network learns, and what is said of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data import DataError


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: SGD with Nesterov momentum, warm-up and linear decay.

    Attributes:
        rate: learning rate for a global batch of ``reference`` images; it grows with the batch.
        most: how many times larger it may become.
        augment: shift and mirror the images, where the network's own layers do not.
    """

    rate: float
    reference: int
    most: float = 64
    momentum: float = 0.9
    weight_decay: float = 5e-4
    augment: bool = False

    def peak(self, batch: int) -> float:
        """Return the learning rate for a global batch, the linear scaling of Goyal et al. 2017."""
        return self.rate * min(batch / self.reference, self.most)


def say(hvd: Any, text: str) -> None:
    """Print on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def report(hvd: Any, told: dict[str, Any], epochs: int, quality: str) -> None:
    """Print an epoch's line; `told` is what Meter.epoch returned."""
    value = told.get(quality)
    tested = "" if value is None else f"{quality.replace('_', ' ')} {value:.4g}  "
    say(
        hvd,
        f"epoch {told['epoch']}/{epochs}  loss {told['train_loss']:.4f}  {tested}"
        f"{told['seconds']:.1f} s  {told['throughput']:.0f} {told['unit']}/s",
    )


def conclude(hvd: Any, told: dict[str, Any]) -> None:
    """Print what the steps went into; `told` is what Meter.final returned."""
    if told["throughput"]:
        say(
            hvd,
            f"{told['throughput']:.1f} {told['unit']}/s; a step of {told['step_mean_s'] * 1e3:.2f} "
            f"ms: computing {told['compute_s'] * 1e3:.2f}, exposed communication "
            f"{told['exposed_s'] * 1e3:.2f}, data {told['data_s'] * 1e3:.2f} ms",
        )


def run(hvd: Any, train: Callable[[], None], program: str) -> None:
    """Train; what a user can mend ends in one line on each node, not in a traceback."""
    try:
        train()
    except (DataError, hvd.UsageError, hvd.NonFiniteGradientError) as error:
        first = not hvd.is_initialized() or hvd.local_rank() == 0
        sys.exit(f"{program}: {error}" if first else 1)
