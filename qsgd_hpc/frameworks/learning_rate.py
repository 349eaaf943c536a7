"""Learning rate schedules over epochs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qsgd_hpc.errors import UsageError

__all__ = ["Schedule", "warmup_multiplier"]


@dataclass(frozen=True)
class Schedule:
    """A learning rate that is multiplied by a function of the epoch, over a range of epochs.

    Args:
        initial_lr: the learning rate to multiply.
        multiplier: function of the epoch, which is fractional within an epoch unless ``staircase``.
        start_epoch: the first epoch of the range.
        end_epoch: the first epoch after the range; None: no end.
        staircase: whether the rate changes at the beginning of an epoch only.
    """

    initial_lr: float
    multiplier: Callable[[float], float]
    start_epoch: float = 0
    end_epoch: float | None = None
    staircase: bool = True

    def __post_init__(self) -> None:
        if not self.initial_lr > 0:
            raise UsageError(f"initial_lr={self.initial_lr!r}: choose a number above 0")

    def at(self, epoch: int, batch: int, steps_per_epoch: int | None) -> float | None:
        """Return the rate to set before a batch, or None to leave it as it is.

        Raises:
            UsageError: the number of steps of an epoch is unknown, and the rate changes within it.
        """
        ended = self.end_epoch is not None and epoch >= self.end_epoch
        if epoch < self.start_epoch or ended or (self.staircase and batch):
            return None
        if self.staircase:
            return self.initial_lr * self.multiplier(epoch)
        if not steps_per_epoch:
            raise UsageError(
                "the number of batches per epoch is unknown, and the learning rate changes "
                "with each batch: pass steps_per_epoch= to the callback (or to fit), or "
                "staircase=True"
            )
        return self.initial_lr * self.multiplier(epoch + batch / steps_per_epoch)


def warmup_multiplier(
    ranks: int, epochs: float, steps: Callable[[], int]
) -> Callable[[float], float]:
    """Return the multiplier of a linear warm-up from one rank's learning rate to the total rate.

    Args:
        ranks: factor from one rank's learning rate to the total.
        epochs: number of epochs after which the total is reached.
        steps: returns the number of batches per epoch.
    Returns:
        The multiplier of the total rate: 1/ranks at first, 1 in the last batch of the warm-up.
    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 2.2.
    """
    if not epochs > 0:
        raise UsageError(f"warmup_epochs={epochs!r}: choose more than 0")

    def multiplier(epoch: float) -> float:
        done = min(1.0, (epoch + 1 / steps()) / epochs)
        return (1 + done * (ranks - 1)) / ranks

    return multiplier
