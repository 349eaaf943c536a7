"""The three word-level LSTMs of Zaremba et al., Recurrent Neural Network Regularization, 2014.

Section 4.1 has two of them; the small one, without dropout, is the baseline of the same authors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

REFERENCE_BATCH = 20


@dataclass(frozen=True)
class Size:
    """One of the networks and how it learns, by plain SGD on a loss summed over a window's words.

    Attributes:
        hidden: of both LSTM layers and the embedding.
        window: words through which gradients go back.
        dropout: share of what goes into and out of each layer that is dropped.
        spread: weights begin uniform in +-spread.
        clip: largest norm of the gradient.
        epochs: passes.
        flat: epochs at the full rate, after which it is divided by `decay` in each.
    """

    hidden: int
    window: int
    dropout: float
    spread: float
    clip: float
    epochs: int
    flat: int
    decay: float


SIZES = {
    "small": Size(200, 20, 0.0, 0.1, 5.0, 13, 4, 2.0),
    "medium": Size(650, 35, 0.5, 0.05, 5.0, 39, 6, 1.2),
    "large": Size(1500, 35, 0.65, 0.04, 10.0, 55, 14, 1.15),
}


def rate(size: Size, batch: int, epoch: int, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate.

    A batch k times 20 sequences has a rate sqrt(k) times 1, not k: most gradients are clipped, so
    a step is as long as the rate says. It is reached in the course of the first epoch.

    Args:
        size: the network; batch: sequences of all ranks; epoch: from 0; step: of this epoch.
    """
    peak = max(1.0, math.sqrt(batch / REFERENCE_BATCH))
    if epoch == 0:
        return 1 + (peak - 1) * (step + 1) / steps_per_epoch
    return peak / math.pow(size.decay, max(0, epoch + 1 - size.flat))
