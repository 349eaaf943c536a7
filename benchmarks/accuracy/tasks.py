"""Trainings: the networks of two tutorials, their images, and their learning rates."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from qsgd_hpc.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tutorials" / name) for name in ("mnist_torch", "resnet34_torch")]

import mnist_data  # noqa: E402
import train_mnist_hvd as mnist_lesson  # noqa: E402
import train_resnet34 as resnet_lesson  # noqa: E402
from resnet import resnet34  # noqa: E402

__all__ = ["BUILDERS", "Images", "Task", "resnet_lesson"]

# All are read before some are selected, so that all test images are used.
CIFAR_IMAGES = 50_000
NOISE_TEST_IMAGES = 100


@dataclass(frozen=True)
class Images:
    """Images and their labels, equal on every rank."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor

    def some(self, count: int | None) -> Images:
        """Return `count` training images, the same on every rank and in every training."""
        if count is None or count >= len(self.x_train):
            return self
        order = torch.randperm(len(self.x_train), generator=torch.Generator().manual_seed(0))
        chosen = order[:count]
        return Images(self.x_train[chosen], self.y_train[chosen], self.x_test, self.y_test)


@dataclass(frozen=True)
class Task:
    """One kind of training; every contestant gets the same weights and the same batches."""

    title: str
    images: Images
    batch: int
    """Images per rank and step."""
    peak: float
    """Largest learning rate, for a batch of ``reference_batch`` on all ranks together."""
    reference_batch: int
    build: Callable[[], nn.Module]
    prepare: Callable[[Tensor], Tensor]
    """Converts stored images to the input of the network."""
    learning_rate: Callable[[int, int, float], float]
    count_correct: Callable[[nn.Module, Tensor, Tensor], int]


def mnist(data: Path | None, *, images: int | None, width: int) -> Task:
    """Return the network of tutorials/mnist_torch, on MNIST or, without a folder, on noise."""
    if data is None:
        pool = _noise((1, 28, 28), torch.float32, images)
    else:
        pool = _tensors(mnist_data.load(data))
    return Task(
        title=f"CNN of tutorials/mnist_torch, {'MNIST' if data else 'noise'}",
        images=pool.some(images),
        batch=64,
        peak=0.03,
        reference_batch=mnist_lesson.REFERENCE_BATCH,
        build=mnist_lesson.build_model,
        prepare=lambda x: x,
        learning_rate=mnist_lesson.learning_rate,
        count_correct=mnist_lesson.count_correct,
    )


def resnet(data: Path | None, *, images: int | None, width: int) -> Task:
    """Return ResNet-34 for CIFAR-10, or for noise without a folder; collective."""
    if data is None:
        pool = _noise((3, 32, 32), torch.uint8, images)
    else:
        wanted = argparse.Namespace(data=str(data), images=CIFAR_IMAGES)
        read = resnet_lesson.load_data(wanted)
        if read.name != "cifar10":
            raise UsageError(f"--data {data}: there is no CIFAR-10; see tutorials/resnet34_torch")
        pool = _tensors(read)
    return Task(
        title=f"ResNet-34 of width {width}, {'CIFAR-10' if data else 'noise'}",
        images=pool.some(images),
        batch=16,
        peak=0.05,
        reference_batch=resnet_lesson.REFERENCE_BATCH,
        build=lambda: resnet34(width),
        prepare=lambda x: resnet_lesson.augment(resnet_lesson.normalise(x)),
        learning_rate=resnet_lesson.learning_rate,
        count_correct=resnet_lesson.count_correct,
    )


BUILDERS: dict[str, Callable[..., Task]] = {"mnist": mnist, "resnet34": resnet}


def _tensors(read: object) -> Images:
    names = ("train_images", "train_labels", "test_images", "test_labels")
    return Images(*(torch.from_numpy(getattr(read, name)) for name in names))


def _noise(shape: tuple[int, ...], dtype: torch.dtype, count: int | None) -> Images:
    generator = torch.Generator().manual_seed(1)
    total = (count or 1000) + NOISE_TEST_IMAGES
    x = torch.randint(0, 256, (total, *shape), generator=generator)
    x = x.to(torch.uint8) if dtype == torch.uint8 else x / 127.5 - 1
    y = torch.randint(0, 10, (total,), generator=generator)
    n = NOISE_TEST_IMAGES
    return Images(x[n:], y[n:], x[:n], y[:n])
