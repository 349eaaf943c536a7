"""Networks for GPUs: a GPT and a ResNet-50, each with one random batch on the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "fsdp"))

from model import Transformer

BLOCKS = (3, 4, 6, 3)
WIDENED = 4  # ratio of a bottleneck's output channels to its inner channels


@dataclass(frozen=True)
class Task:
    """A network and its batch; `sizes` describes the size of the batch."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.device], tuple[Tensor, Tensor]]
    sizes: str


def gpt(tiny: bool) -> Task:
    """Return GPT-2 small (Radford et al., 2019): 124 million parameters; or a tiny one."""
    words, width, layers, heads, context, count = 50257, 768, 12, 12, 512, 4
    if tiny:
        words, width, layers, heads, context, count = 211, 64, 2, 4, 16, 2

    def build() -> nn.Module:
        model = Transformer(words, width, layers, heads, context)
        model.head.weight = model.embedding.weight
        return model

    def batch(device: torch.device) -> tuple[Tensor, Tensor]:
        x = torch.randint(0, words, (count, context + 1), device=device)
        return x[:, :-1].contiguous(), x[:, 1:].flatten()

    return Task(build, batch, f"{count} x {context} words")


def resnet50(tiny: bool) -> Task:
    """Return ResNet-50 (He et al., CVPR 2016): 25.6 million parameters; or a thin one."""
    width, classes, pixels, count = (8, 10, 32, 4) if tiny else (64, 1000, 224, 32)

    def batch(device: torch.device) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 3, pixels, pixels, device=device)
        return x, torch.randint(0, classes, (count,), device=device)

    sizes = f"{count} images of {pixels} x {pixels}"
    return Task(lambda: residual_network(width, classes), batch, sizes)


class Bottleneck(nn.Module):
    """A 1 x 1, a 3 x 3 and a widening 1 x 1 convolution, with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(),
            *convolution(width, width, 3, stride),
            nn.ReLU(),
            *convolution(width, WIDENED * width, 1),
        )
        same = stride == 1 and inputs == WIDENED * width
        self.short_cut = nn.Sequential(
            *([] if same else convolution(inputs, WIDENED * width, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, 4 width, h / stride, w / stride)."""
        return torch.relu(self.body(x) + self.short_cut(x))


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution and its batch norm, without running averages, which DDP would send."""
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return [layer, nn.BatchNorm2d(outputs, track_running_stats=False)]


def residual_network(width: int, classes: int) -> nn.Sequential:
    """Return a stem for ImageNet and stages of bottlenecks, each with twice the channels."""
    layers = [*convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    inputs = width
    for stage, blocks in enumerate(BLOCKS):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(inputs, width << stage, stride))
            inputs = WIDENED * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


TASKS = {"gpt": gpt, "resnet50": resnet50}
