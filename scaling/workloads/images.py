"""Find and read labelled images, in numpy arrays.

MNIST as IDX files in DIR or DIR/mnist; JPEG files in a folder per class, in train/ and test/ (or
val/) of DIR, DIR/imagenet or DIR/cifar10; CIFAR-10 as such a tree in cifar10.tar.xz. JPEG files are
decoded batch by batch, as in every training on ImageNet. Where no folder is named, scikit-learn's
digits stand in for all of them.
"""

from __future__ import annotations

import argparse
import gzip
import io
import lzma
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from data import DataError, absent
from numpy.typing import NDArray
from options import data_folder

SYNTHETIC = 2048  # images to train on
DIGITS_TRAIN = 1500  # of 1,797; the rest, written by other people, is the test set


@dataclass(frozen=True)
class Images:
    """Labelled images; ``pixels`` are an array, or JPEG files as paths or bytes.

    Attributes:
        labels: int64, shape (n,).
        size: pixels a side.
    """

    pixels: Any
    labels: NDArray[np.int64]
    size: int

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return images, uint8, shape (n, size, size, channels), and their labels."""
        if isinstance(self.pixels, np.ndarray):
            return self.pixels[chosen % len(self.pixels)], self.labels[chosen]
        files = (self.pixels[i] for i in chosen)
        images = list(_decoders().map(lambda file: decode(file, self.size), files))
        return np.stack(images), self.labels[chosen]

    def first(self, count: int | None) -> Images:
        """Return the first images, or all."""
        pixels = self.pixels if isinstance(self.pixels, np.ndarray) else self.pixels[:count]
        return replace(self, pixels=pixels, labels=self.labels[:count])


@dataclass(frozen=True)
class DataSet:
    """Images to train on and to test with."""

    name: str
    classes: int
    train: Images
    test: Images


def mnist(folder: Path | None) -> DataSet:
    """Read MNIST: 60,000 and 10,000 images of 28 x 28 pixels; the digits without a folder."""
    if folder is None:
        return digits(28, 1)
    for place in (folder, folder / "mnist"):
        if any(place.glob("train-images-idx3-ubyte*")):
            train, test = (_idx_pair(place, part) for part in ("train", "t10k"))
            return DataSet("mnist", 10, train, test)
    raise absent("MNIST's IDX files", folder, "train-images-idx3-ubyte.gz and its three siblings")


def _idx_pair(folder: Path, part: str) -> Images:
    images = read_idx(folder / f"{part}-images-idx3-ubyte")
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte").astype(np.int64)
    if images.shape != (len(labels), 28, 28) or len(labels) == 0:
        raise DataError(
            f"{folder}: images of shape {images.shape} and {len(labels)} labels in {part}-*; "
            "expected (n, 28, 28) and n. Copy the files anew."
        )
    return Images(images[..., None], labels, 28)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an IDX file of bytes, plain or with .gz added: 0, 0, 8, dimensions; lengths; data."""
    packed = path.with_name(f"{path.name}.gz")
    try:
        raw = gzip.decompress(packed.read_bytes()) if packed.is_file() else path.read_bytes()
        shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise DataError(f"{path}: not a whole IDX file ({error}). Copy it anew.") from None


def photos(folder: Path | None, size: int | None, most: int | None) -> DataSet:
    """Find an ImageNet-like tree of JPEG files, or CIFAR-10.

    Args:
        folder: what --data names; None stands for the digits.
        size: pixels a side to which images are brought; None is 32 for CIFAR-10 and the digits,
            else 224.
        most: read no more training images than that, evenly from the classes.
    """
    if folder is None:
        return digits(size or 32, 3, most)
    for place in (folder, folder / "imagenet", folder / "cifar10"):
        archive = place / "cifar10.tar.xz"
        test = next((place / p for p in ("test", "val") if (place / p).is_dir()), None)
        if (place / "train").is_dir() and test is not None:
            return _assemble(
                place.name, {"train": _tree(place / "train"), "test": _tree(test)}, size, most
            )
        if archive.is_file():
            return _assemble("cifar10", _archive(archive), size, most)
    raise absent("images", folder, "train/CLASS/*.jpg and test/CLASS/*.jpg, or cifar10.tar.xz")


Classes = dict[str, list[Any]]


def _tree(folder: Path) -> Classes:
    kinds = {".jpg", ".jpeg"}
    return {
        each.name: [str(p) for p in sorted(each.iterdir()) if p.suffix.lower() in kinds]
        for each in sorted(folder.iterdir())
        if each.is_dir()
    }


def _archive(path: Path) -> dict[str, Classes]:
    parts: dict[str, Classes] = {"train": {}, "test": {}}
    try:
        with tarfile.open(path, "r:xz") as tar:
            for member in tar:
                part, label, name = ("", "", *member.name.split("/"))[-3:]
                content = tar.extractfile(member) if name.endswith(".jpg") else None
                if content is not None and part in parts:
                    parts[part].setdefault(label, []).append(content.read())
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise DataError(f"{path}: cannot be unpacked ({error}). Copy it anew.") from None
    return parts


def _assemble(name: str, parts: dict[str, Classes], size: int | None, most: int | None) -> DataSet:
    labels = sorted(parts["train"])
    if not labels or sorted(parts["test"]) != labels:
        raise DataError(
            f"{name}: {len(labels)} classes to train on and {len(parts['test'])} to test with; "
            "expected the same folders in both, each with JPEG files."
        )
    size = size or (32 if name == "cifar10" else 224)
    each = -(-most // len(labels)) if most else None
    few = each and -(-each // 5)  # as many to test with as CIFAR-10 has for its training images
    chosen = [
        {label: files[:count] for label, files in sorted(parts[part].items())}
        for part, count in (("train", each), ("test", few))
    ]
    train, test = (
        Images(
            [file for files in part.values() for file in files],
            np.repeat(np.arange(len(labels)), [len(files) for files in part.values()]),
            size,
        )
        for part in chosen
    )
    return DataSet(name, len(labels), train, test)


@cache
def _decoders() -> ThreadPoolExecutor:
    """Return a thread for each core of this rank: decoding does not hold Python's lock."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)))


def decode(file: str | bytes, size: int) -> NDArray[np.uint8]:
    """Return a JPEG's pixels, shape (size, size, 3): its middle square, scaled."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading JPEG needs Pillow: pip install pillow") from None
    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            image.draft("RGB", (size, size))  # lets the decoder skip what scaling would discard
            square = image.convert("RGB")
            side = min(square.size)
            left, top = (square.width - side) // 2, (square.height - side) // 2
            box = (left, top, left + side, top + side)
            if square.size != (size, size):
                square = square.resize((size, size), Image.Resampling.BILINEAR, box)
            return np.asarray(square)
    except OSError as error:
        name = "an image" if isinstance(file, bytes) else file
        raise DataError(f"{name}: not a whole JPEG file ({error}). Copy it anew.") from None


def digits(size: int, channels: int, most: int | None = None) -> DataSet:
    """Read scikit-learn's 1,797 digits of 8 x 8 pixels, enlarged; the last 297 are the test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "no folder of images is named by --data or QSGD_DATA, and scikit-learn, whose digits "
            "could stand in, is not installed: pip install scikit-learn, or train on made-up data "
            "with --synthetic"
        ) from None
    found = load_digits()
    cells = np.arange(size) * 8 // size
    pixels = (found.images * (255 / 16)).astype(np.uint8)[:, cells][:, :, cells]
    pixels = np.repeat(pixels[..., None], channels, axis=3)
    labels = found.target.astype(np.int64)
    train, test = slice(min(most or DIGITS_TRAIN, DIGITS_TRAIN)), slice(DIGITS_TRAIN, None)
    return DataSet(
        "digits",
        10,
        Images(pixels[train], labels[train], size),
        Images(pixels[test], labels[test], size),
    )


def synthetic(classes: int, size: int, channels: int, count: int | None) -> DataSet:
    """Make up images: a coarse pattern for each class under noise; the same on every rank."""
    random = np.random.default_rng(0)
    patterns = random.integers(0, 128, (classes, 4, 4, channels), dtype=np.uint8)
    count = count or SYNTHETIC
    # More than these would only take memory: what a step costs does not depend on the pixels.
    distinct = min(count, 2048 if size <= 32 else 128)
    labels = np.arange(count) % distinct % classes
    cells = np.arange(size) * 4 // size
    pixels = patterns[labels[:distinct]][:, cells][:, :, cells]
    pixels += random.integers(0, 128, pixels.shape, dtype=np.uint8)
    train = Images(pixels, labels, size)
    return DataSet("synthetic", classes, train, train.first(-(-count // 5)))


def from_options(args: argparse.Namespace) -> DataSet:
    """Return the photographs that the options of ``options.for_images`` ask for."""
    if args.synthetic:
        return synthetic(args.classes or 1000, args.image_size or 224, 3, args.images)
    data = photos(data_folder(args), args.image_size, args.images)
    if args.classes and args.classes < data.classes:
        raise DataError(f"--classes {args.classes}: {data.name} has {data.classes} of them")
    return replace(data, classes=args.classes or data.classes)
