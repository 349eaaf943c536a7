"""ResNet-34 for images of 32 x 32 pixels, and narrower.

Source: He et al., Deep Residual Learning for Image Recognition, CVPR 2016, tables 1 and 6: the
layer plan 3-4-6-3 of ImageNet's network behind the 3 x 3 stem of CIFAR's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["resnet34"]

LAYERS = (3, 4, 6, 3)


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a short cut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short_cut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short_cut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        return torch.relu(self.body(x) + self.short_cut(x))


def resnet34(width: int = 64, classes: int = 10) -> nn.Sequential:
    """Build the network.

    Args:
        width: channels of the first stage, doubled in each of the next three: 64 gives the
            ResNet-34 of the paper (21.3 million parameters), 16 one with 1.3 million.
        classes: outputs.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    inputs = width
    for stage, blocks in enumerate(LAYERS):
        outputs = width << stage
        for block in range(blocks):
            layers.append(Residual(inputs, outputs, stride=2 if stage > 0 and block == 0 else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
