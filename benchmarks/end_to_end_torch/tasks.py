"""Trainings: a network, its batches, and the loss of one batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
for lesson in ("resnet34_torch", "mnist_torch"):
    sys.path.insert(0, str(ROOT / "tutorials" / lesson))

import cifar_data  # noqa: E402
import mnist_data  # noqa: E402
from resnet import resnet34  # noqa: E402
from train_mnist import build_model as mnist_network  # noqa: E402

IMAGES = 2000
WORDS_A_SEQUENCE = 35


@dataclass(frozen=True)
class Objective:
    """A network, and what a step of its training minimizes."""

    title: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    clip: float | None
    """Largest norm of the averaged gradient."""


@dataclass(frozen=True)
class Task(Objective):
    """One kind of training; every contestant gets the same weights and the same batches."""

    unit: str
    """The unit of a batch: images or words."""
    units_a_step: int
    """Units per step of one rank."""
    batch: Callable[[int], tuple[Tensor, Tensor]]
    """Returns this rank's share of the inputs and targets of a step."""
    rate: float
    momentum: float


class WordModel(nn.Module):
    """The LSTM of Zaremba et al., Recurrent Neural Network Regularization, 2014.

    Without dropout, and with a zero initial state for each sequence, so that losses are comparable.
    Initial weights are uniform in +-``scale``; the default is that of the paper's medium network.
    """

    def __init__(self, words: int, hidden: int, *, layers: int = 2, scale: float = 0.05) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=layers, batch_first=True)
        self.output = nn.Linear(hidden, words)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -scale, scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map words, shape (n, t), to scores of the next word, shape (n * t, words)."""
        hidden, _ = self.lstm(self.embedding(x))
        scores: Tensor = self.output(hidden.flatten(0, 1))
        return scores


def ptb(folder: Path | None, *, rank: int, ranks: int, batch: int, hidden: int) -> Task:
    """Return the language model on Penn Treebank's words, or on random words without a folder."""
    if folder is None:
        text = torch.randint(0, 10_000, (400_000,), generator=torch.Generator().manual_seed(1))
        count = 10_000
    else:
        words = (folder / "ptb.train.txt").read_text().replace("\n", "<eos>").split(" ")
        numbers = {word: i for i, word in enumerate(dict.fromkeys(words))}
        text = torch.tensor([numbers[word] for word in words])
        count = len(numbers)
    # Every sequence of the global batch reads a separate part of the text.
    rows = text[: len(text) // (batch * ranks) * (batch * ranks)].view(batch * ranks, -1)
    mine = rows[rank * batch : (rank + 1) * batch]
    steps = (mine.shape[1] - 1) // WORDS_A_SEQUENCE

    def take(step: int) -> tuple[Tensor, Tensor]:
        at = step % steps * WORDS_A_SEQUENCE
        end = at + WORDS_A_SEQUENCE
        return mine[:, at:end], mine[:, at + 1 : end + 1].flatten()

    return Task(
        title=f"LSTM 2 x {hidden}, {'PTB' if folder else 'random words'}",
        unit="words",
        units_a_step=batch * WORDS_A_SEQUENCE,
        build=lambda: WordModel(count, hidden),
        batch=take,
        loss=cross_entropy,
        rate=1.0,
        momentum=0.0,
        clip=5.0,
    )


def resnet(folder: Path | None, *, rank: int, ranks: int, batch: int, width: int) -> Task:
    """Return ResNet-34 on CIFAR-10's JPEG images, or on noise without a folder."""
    if folder is None:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(IMAGES, 3, 32, 32, generator=generator)
        labels = torch.randint(0, 10, (IMAGES,), generator=generator)
    else:
        data = cifar_data.load(cifar_data.find(folder), IMAGES)
        images = torch.from_numpy(data.train_images).float() / 127.5 - 1
        labels = torch.from_numpy(data.train_labels)
    return Task(
        title=f"ResNet-34 of width {width}, {'CIFAR-10' if folder else 'noise'}",
        unit="images",
        units_a_step=batch,
        build=lambda: resnet34(width),
        batch=_shuffled(images, labels, rank=rank, ranks=ranks, batch=batch),
        loss=cross_entropy,
        rate=0.02,
        momentum=0.9,
        clip=None,
    )


def mnist(folder: Path | None, *, rank: int, ranks: int, batch: int) -> Task:
    """Return the small convolutional network of the MNIST lesson, on noise without a folder."""
    if folder is None:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(IMAGES, 1, 28, 28, generator=generator)
        labels = torch.randint(0, 10, (IMAGES,), generator=generator)
    else:
        data = mnist_data.load(folder)
        images, labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    return Task(
        title=f"CNN, {'MNIST' if folder else 'noise'}",
        unit="images",
        units_a_step=batch,
        build=mnist_network,
        batch=_shuffled(images, labels, rank=rank, ranks=ranks, batch=batch),
        loss=cross_entropy,
        rate=0.05,
        momentum=0.9,
        clip=None,
    )


def _shuffled(
    images: Tensor, labels: Tensor, *, rank: int, ranks: int, batch: int
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function that returns a rank's share of a step's images, in random order."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(2))

    def take(step: int) -> tuple[Tensor, Tensor]:
        at = (step * ranks + rank) * batch
        chosen = order[torch.arange(at, at + batch) % len(order)]
        return images[chosen], labels[chosen]

    return take


class OneMatrix(nn.Module):
    """25 MiB of parameters in one gradient, a bucket of DDP's default size."""

    SIDE = 2560

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(self.SIDE, self.SIDE))

    def forward(self, x: Tensor) -> Tensor:
        """Return a number whose gradient is x."""
        return torch.dot(self.weight.flatten(), x)


def bucket(*, rank: int) -> Task:
    """Return a task that consists almost only of the exchange of one bucket."""
    gradient = torch.randn(OneMatrix.SIDE**2, generator=torch.Generator().manual_seed(rank))
    return Task(
        title="one bucket of 25 MiB",
        unit="buckets",
        units_a_step=1,
        build=OneMatrix,
        batch=lambda step: (gradient, gradient),
        loss=lambda model, batch: model(batch[0]),
        rate=0.0,
        momentum=0.0,
        clip=None,
    )


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch of inputs and classes."""
    return F.cross_entropy(model(batch[0]), batch[1])
