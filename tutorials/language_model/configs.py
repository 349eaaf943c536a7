"""The three networks of Zaremba et al., Recurrent Neural Network Regularization, 2014.

Section 4.1 has the medium and the large one; the small one, without dropout, comes from the code
that its authors published with it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONFIGS", "LAYERS", "Config"]

LAYERS = 2


@dataclass(frozen=True)
class Config:
    """A network and how it learns: plain SGD at a rate of 1, later less.

    Attributes:
        hidden: width of the embedding and of both LSTM layers.
        num_steps: words of a window, through which gradients go back.
        dropout: share of what goes into and out of each layer that is dropped.
        init_scale: weights begin uniform in +-init_scale.
        max_grad_norm: a longer gradient is shortened to this.
        epochs: passes over the text.
        flat_epochs: how many have the full rate; in each later one it is divided by `decay`.
        batch_size: rows of text that are read side by side, on all ranks together.
    """

    hidden: int
    num_steps: int
    dropout: float
    init_scale: float
    max_grad_norm: float
    epochs: int
    flat_epochs: int
    decay: float
    batch_size: int = 20

    def learning_rate(self, epoch: int) -> float:
        """Return the rate of an epoch, counted from 0."""
        return 1.0 / self.decay ** max(0, epoch + 1 - self.flat_epochs)


CONFIGS = {
    "small": Config(200, 20, 0.0, 0.1, 5.0, 13, 4, 2.0),
    "medium": Config(650, 35, 0.5, 0.05, 5.0, 39, 6, 1.2),
    "large": Config(1500, 35, 0.65, 0.04, 10.0, 55, 14, 1.15),
}
