"""Train ResNet-50 (He et al., Deep Residual Learning for Image Recognition, CVPR 2016, table 1).

    qsgd-hpc run -np 8 --bits 4 resnet50.py --data DIR                     # DIR holds images
    qsgd-hpc run -np 2 resnet50.py --synthetic --width 16 --image-size 32  # fits a laptop

resnet34.py with blocks of three convolutions: 25.6 million parameters at 1,000 classes.
"""

from __future__ import annotations

import common
import torch
from resnet34 import convolution, parse, short_cut, train
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """A 1 x 1, a 3 x 3 and a widening 1 x 1 convolution beside a short cut.

    The stride is the 3 x 3 convolution's, as in all later implementations (ResNet v1.5).
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.body = nn.Sequential(
            convolution(inputs, width, 1, 1),
            nn.ReLU(),
            convolution(width, width, 3, stride),
            nn.ReLU(),
            convolution(width, outputs, 1, 1),
        )
        self.short_cut = short_cut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, 4 width, h / stride, w / stride)."""
        return torch.relu(self.body(x) + self.short_cut(x))


if __name__ == "__main__":
    common.run(lambda: train(Bottleneck, parse("ResNet-50")), "resnet50")
