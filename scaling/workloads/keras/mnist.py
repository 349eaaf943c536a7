"""Train a small convolutional network on MNIST, with Keras on TensorFlow.

qsgd-hpc run -np 2 --bits 4 mnist.py --data DIR --epochs 1
"""

from __future__ import annotations

import common
import images
import options
from keras import Sequential, layers

RECIPE = common.Recipe(rate=0.03, reference=64, most=8)


def network() -> Sequential:
    """Two convolutions and two dense layers, as in ../torch/mnist.py: 207,018 parameters."""
    return Sequential([
        *common.to_floats(28, channels=1),
        layers.Conv2D(16, 3, padding="same"), layers.MaxPooling2D(),
        layers.GroupNormalization(4), layers.ReLU(),
        layers.Conv2D(32, 3, padding="same"), layers.MaxPooling2D(),
        layers.GroupNormalization(4), layers.ReLU(),
        layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(10),
    ])  # fmt: skip


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
