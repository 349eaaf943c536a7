"""Train ResNet-34 (He et al., Deep Residual Learning for Image Recognition, CVPR 2016, table 1).

    qsgd-hpc run -np 8 --bits 4 resnet34.py --data DIR                     # DIR holds images
    qsgd-hpc run -np 2 resnet34.py --synthetic --width 16 --image-size 32  # fits a laptop

At 224 pixels and 1,000 classes this is the network of the paper, 21.8 million parameters. Images
below 64 pixels are met by CIFAR's stem instead: one 3 x 3 convolution that keeps their size, where
ImageNet's would leave a 32-pixel image 8 x 8 before the first block.
"""

from __future__ import annotations

import argparse
from typing import Any

import common
import images
import options
import torch
from torch import Tensor, nn

RECIPE = common.Recipe(rate=0.1, reference=256, weight_decay=1e-4, augment=True)
LAYERS = (3, 4, 6, 3)
SMALL = 64  # pixels a side, from which on the stem is ImageNet's


class Basic(nn.Module):
    """Two 3 x 3 convolutions beside a short cut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            convolution(inputs, width, 3, stride), nn.ReLU(), convolution(width, width, 3, 1)
        )
        self.short_cut = short_cut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, width, h / stride, w / stride)."""
        return torch.relu(self.body(x) + self.short_cut(x))


def convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Sequential:
    """Return a convolution and its batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


def short_cut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return what brings a block's input to its output's shape."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return convolution(inputs, outputs, 1, stride)


def residual_network(block: Any, width: int, classes: int, image_size: int) -> nn.Sequential:
    """Stack blocks by LAYERS; the first stage has `width` channels, each next one twice as many."""
    layers: list[nn.Module] = [convolution(3, width, 3, 1), nn.ReLU()]
    if image_size >= SMALL:
        layers = [convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    inputs = width
    for stage, blocks in enumerate(LAYERS):
        for number in range(blocks):
            stride = 2 if stage > 0 and number == 0 else 1
            layers.append(block(inputs, width << stage, stride))
            inputs = (width << stage) * block.expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def train(block: Any, args: argparse.Namespace) -> None:
    """Train the network of these blocks."""
    common.train_images(
        args,
        RECIPE,
        lambda: images.from_options(args),
        lambda classes, size: residual_network(block, args.width, classes, size),
    )


def parse(name: str) -> argparse.Namespace:
    """Read the command line."""
    parser = options.for_images(f"Train {name}.", epochs=90, batch=32)
    parser.add_argument("--width", type=options.positive, default=64, help="of stage 1 (64)")
    args: argparse.Namespace = parser.parse_args()
    return args


if __name__ == "__main__":
    common.run(lambda: train(Basic, parse("ResNet-34")), "resnet34")
