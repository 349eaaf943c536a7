"""Train a small convolutional network on MNIST.

qsgd-hpc run -np 2 --bits 4 mnist.py --data DIR --epochs 1
"""

from __future__ import annotations

import common
import images
import options
from torch import nn

RECIPE = common.Recipe(rate=0.03, reference=64, most=8)


def network() -> nn.Sequential:
    """Two convolutions and two linear layers, 207,018 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def main() -> None:
    """Read the command line and train."""
    args = options.parser("Train a small network on MNIST.", epochs=3, batch=64).parse_args()

    def read() -> images.DataSet:
        if args.synthetic:
            return images.synthetic(10, 28, 1, None)
        return images.mnist(options.data_folder(args))

    common.train_images(args, RECIPE, read, lambda classes, size: network())


if __name__ == "__main__":
    common.run(main, "mnist")
