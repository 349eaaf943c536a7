"""Find and read CIFAR-10 as JPEG files; scikit-learn's digits where there is none.

The files are FOLDER/{train,test}/CLASS/NAME.jpg, ten classes of 32 x 32 colour images, unpacked or
in cifar10.tar.xz. No rank downloads anything.
"""

from __future__ import annotations

import io
import lzma
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["DataError", "DataSet", "data_dir", "find", "load"]

ARCHIVE = "cifar10.tar.xz"
DIGITS_TRAIN = 1500  # of 1,797; the rest, written by other people, is the test set
Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]


class DataError(Exception):
    """A data file is damaged, or no data set can be had; the message says what to do."""


@dataclass(frozen=True)
class DataSet:
    """Images: uint8, shape (n, 3, 32, 32). Labels: int64, shape (n,), 0 to 9."""

    name: str  # "cifar10" or "digits"
    train_images: Bytes
    train_labels: Labels
    test_images: Bytes
    test_labels: Labels


def data_dir(argument: str | None) -> Path | None:
    """Return the folder to look in: the argument, else QSGD_DATA, else none."""
    chosen = argument or os.environ.get("QSGD_DATA")
    return Path(chosen).expanduser() if chosen else None


def find(folder: Path | None) -> Path | None:
    """Return where CIFAR-10 is: a folder with train/ and test/, or the archive; None if nowhere.

    The folder itself is looked at first, then its ``cifar10``.
    """
    for place in (folder, folder / "cifar10") if folder else ():
        if (place / "train").is_dir() and (place / "test").is_dir():
            return place
        if (place / ARCHIVE).is_file():
            return place / ARCHIVE
    return None


def load(source: Path | None, count: int) -> DataSet:
    """Read `count` training images and a fifth as many test images, evenly from the classes.

    Args:
        source: what `find` returned; None stands for the digits.
        count: training images wanted; the data set may hold fewer.
    Raises:
        DataError: a file cannot be read, classes are missing, or a library is not installed.
    """
    if source is None:
        return _digits(count)
    each = {"train": -(-count // 10), "test": -(-count // 50)}
    files = _members(source, each) if source.is_file() else _tree(source, each)
    images: dict[tuple[str, str], list[Bytes]] = {}
    for part, label, name, data in files:
        images.setdefault((part, label), []).append(_decode(name, data))
    names = sorted({label for _, label in images})
    if len(names) != 10 or len(images) != 20:
        raise DataError(
            f"{source}: expected ten classes in train/ and the same in test/, "
            f"found {', '.join(names) or 'none'}."
        )
    return DataSet("cifar10", *_stack(images, "train", names), *_stack(images, "test", names))


File = tuple[str, str, str, bytes]  # part, class, name for messages, content


def _tree(folder: Path, each: dict[str, int]) -> Iterator[File]:
    for part, most in each.items():
        for label in sorted(p for p in (folder / part).iterdir() if p.is_dir()):
            for path in sorted(label.glob("*.jpg"))[:most]:
                yield part, label.name, str(path), path.read_bytes()


def _members(archive: Path, each: dict[str, int]) -> Iterator[File]:
    taken: dict[tuple[str, str], int] = {}
    try:
        with tarfile.open(archive, "r:xz") as tar:
            for member in tar:
                part, label, _ = ("", "", *member.name.split("/"))[-3:]
                key = part, label
                wanted = member.isfile() and member.name.endswith(".jpg")
                if not wanted or taken.get(key, 0) >= each.get(part, 0):
                    continue
                taken[key] = taken.get(key, 0) + 1
                content = tar.extractfile(member)
                assert content is not None
                yield part, label, f"{archive}:{member.name}", content.read()
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise DataError(f"{archive}: cannot be unpacked ({error}). Copy it anew.") from None


def _decode(name: str, data: bytes) -> Bytes:
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"{name}: reading JPEG needs Pillow: pip install pillow") from None
    try:
        with Image.open(io.BytesIO(data)) as image:
            pixels: Bytes = np.asarray(image.convert("RGB"))
    except OSError as error:
        raise DataError(f"{name}: not a whole JPEG image ({error}). Copy it anew.") from None
    if pixels.shape != (32, 32, 3):
        raise DataError(f"{name}: expected 32 x 32 pixels, found {pixels.shape[1::-1]}.")
    return np.moveaxis(pixels, 2, 0)


def _stack(
    images: dict[tuple[str, str], list[Bytes]], part: str, names: list[str]
) -> tuple[Bytes, Labels]:
    lists = [images[part, name] for name in names]
    labels = np.repeat(np.arange(10, dtype=np.int64), [len(one) for one in lists])
    return np.stack([image for one in lists for image in one]), labels


def _digits(count: int) -> DataSet:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "no CIFAR-10, and scikit-learn, whose 1,797 digits could stand in, is not installed. "
            "Give the folder of CIFAR-10 with --data, or: pip install scikit-learn"
        ) from None
    bunch = load_digits()
    grey = (bunch.images * (255 / 16)).astype(np.uint8).repeat(4, axis=1).repeat(4, axis=2)
    images, labels = np.repeat(grey[:, None], 3, axis=1), bunch.target.astype(np.int64)
    n = min(count, DIGITS_TRAIN)
    test = slice(DIGITS_TRAIN, DIGITS_TRAIN + -(-count // 5))
    return DataSet("digits", images[:n], labels[:n], images[test], labels[test])
