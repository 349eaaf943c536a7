"""Find, download, check and read MNIST; scikit-learn's digits where there is none.

Both training scripts of this lesson use it. It knows nothing of ranks: `prepare` may touch the
network and is called by one process per node, `load` only reads what is there.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import socket
import sys
import tempfile
import urllib.request
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["DataError", "DataSet", "data_dir", "download", "find", "load", "prepare", "read_idx"]

# SHA-256 of the *unpacked* files: mirrors pack them differently, the images are the same.
FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
)
# Compute nodes often drop outgoing packets without an answer: five seconds of silence tell.
TIMEOUT_S = 5.0
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081  # of the 60,000 training images, scaled to 0..1
REMEDY = "Delete it and run again to download it, or copy it from a machine where it is whole."
DIGITS_TRAIN = 1500  # of 1,797; the rest, written by other people, is the test set


class DataError(Exception):
    """A data file is damaged, or no data set can be had; the message says what to do."""


@dataclass(frozen=True)
class DataSet:
    """Images: float32, shape (n, 1, 28, 28), normalised. Labels: int64, shape (n,), 0 to 9."""

    name: str  # "mnist" or "digits"
    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]


def data_dir(argument: str | None) -> Path:
    """Return the folder to look in: the argument, QSGD_DATA, or a cache in the home folder."""
    chosen = argument or os.environ.get("QSGD_DATA") or "~/.cache/qsgd-hpc/mnist"
    return Path(chosen).expanduser()


def find(folder: Path) -> dict[str, Path] | None:
    """Return the path of each of the four files, plain or .gz, or None when any is absent.

    The folder itself is looked at first, then its ``mnist`` and ``MNIST/raw`` (torchvision's).
    """
    for place in (folder, folder / "mnist", folder / "MNIST" / "raw"):
        found = {
            name: path
            for name in FILES
            for path in (place / f"{name}.gz", place / name)
            if path.is_file()
        }
        if len(found) == len(FILES):
            return found
    return None


def read_idx(path: Path, magic: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, plain or gzip.

    Args:
        path: the file; one that ends in .gz is unpacked on the way.
        magic: 0x801 for labels, shape (n,); 0x803 for images, shape (n, rows, columns).
    Raises:
        DataError: not gzip, another magic number, or fewer or more bytes than the header promises.
    Source: http://yann.lecun.com/exdb/mnist, "file formats".
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be unpacked ({error}). {REMEDY}") from None
    begin, header_bytes = magic.to_bytes(4, "big"), 4 + 4 * (magic & 0xFF)
    if data[:4] != begin or len(data) < header_bytes:
        raise DataError(
            f"{path}: expected an IDX file: {header_bytes} bytes of header that begin with "
            f"{begin.hex(' ')}; found {len(data)} bytes: {data[:4].hex(' ')}. {REMEDY}"
        )
    shape = tuple(int(length) for length in np.frombuffer(data[4:header_bytes], dtype=">u4"))
    expected, found = math.prod(shape), len(data) - header_bytes
    if found != expected:
        raise DataError(
            f"{path}: its header promises {' x '.join(map(str, shape))} = {expected} bytes, "
            f"found {found}. {REMEDY}"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=header_bytes).reshape(shape)


def download(folder: Path, mirrors: Sequence[str] = MIRRORS) -> None:
    """Fetch the four files into `folder`, each checked and then put in place in one step.

    Raises:
        OSError: the folder cannot be written.
        DataError: no mirror answered, or none gave MNIST's own bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, digest in FILES.items():
        packed = _fetch(f"{name}.gz", digest, mirrors)
        # Nodes that share a file system may get here together: the last rename wins, all are whole.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}.", delete=False) as partial:
            partial.write(packed)
        Path(partial.name).chmod(0o644)
        Path(partial.name).replace(folder / f"{name}.gz")


def _fetch(name: str, digest: str, mirrors: Sequence[str]) -> bytes:
    fault: Exception = DataError("no mirror given")
    for mirror in mirrors:
        try:
            with urllib.request.urlopen(f"{mirror}/{name}", timeout=TIMEOUT_S) as answer:
                packed: bytes = answer.read()
            found = hashlib.sha256(gzip.decompress(packed)).hexdigest()
            if found == digest:
                return packed
            fault = DataError(f"{mirror}/{name}: expected SHA-256 {digest} unpacked, found {found}")
        except (OSError, EOFError, zlib.error) as error:
            fault = DataError(f"{mirror}/{name}: {error}")
            if isinstance(getattr(error, "reason", None), socket.gaierror):
                break  # no name service, so no network: the next mirror would only cost time
    raise fault


def prepare(folder: Path) -> bool:
    """Make MNIST be in `folder`, downloading it if need be; False when that cannot be done.

    Call it in one process per node, before any process calls `load`.
    """
    if find(folder):
        return True
    try:
        download(folder)
    except (OSError, DataError) as error:
        _say(f"{folder} lacks MNIST's four files and none came from the network ({error}).")
        return False
    _say(f"downloaded MNIST to {folder}.")
    return True


def load(folder: Path | None) -> DataSet:
    """Read MNIST from `folder`; None stands for scikit-learn's digits.

    Raises:
        DataError: a file is absent or damaged, or scikit-learn is not installed.
    """
    return _digits() if folder is None else _mnist(folder)


def _mnist(folder: Path) -> DataSet:
    paths = find(folder)
    if paths is None:
        raise DataError(
            f"{folder}: expected {', '.join(FILES)} (plain or .gz), found not all of them."
        )
    train, test = (_split(paths, part) for part in ("train", "t10k"))
    return DataSet("mnist", *train, *test)


def _split(paths: dict[str, Path], part: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    images_path, labels_path = (
        paths[f"{part}-images-idx3-ubyte"],
        paths[f"{part}-labels-idx1-ubyte"],
    )
    images, labels = read_idx(images_path, 0x803), read_idx(labels_path, 0x801)
    if images.shape != (len(labels), 28, 28) or len(labels) == 0 or labels.max() > 9:
        raise DataError(
            f"{images_path} has images of shape {images.shape}, {labels_path} labels of shape "
            f"{labels.shape}; expected (n, 28, 28) and (n,), n >= 1, labels 0 to 9. {REMEDY}"
        )
    return _normalise(images / np.float32(255)), labels.astype(np.int64)


def _digits() -> DataSet:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "no MNIST, and scikit-learn, whose 1,797 digits could stand in, is not installed. "
            "Give the folder of the MNIST files with --data, or: pip install scikit-learn"
        ) from None
    bunch = load_digits()
    images = _normalise(_enlarge(bunch.images.astype(np.float32) / 16))
    labels = bunch.target.astype(np.int64)
    n = DIGITS_TRAIN
    return DataSet("digits", images[:n], labels[:n], images[n:], labels[n:])


def _enlarge(images: NDArray[np.float32], width: int = 28) -> NDArray[np.float32]:
    """Enlarge square images (n, w, w) to (n, width, width), linearly between pixel centres."""
    old = images.shape[1]
    at = np.clip((np.arange(width, dtype=np.float32) + 0.5) * old / width - 0.5, 0, old - 1)
    weights = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(old, dtype=np.float32)))
    return np.asarray(weights @ images @ weights.T, dtype=np.float32)


def _normalise(images: NDArray[np.float32]) -> NDArray[np.float32]:
    scaled: NDArray[np.float32] = (images - np.float32(PIXEL_MEAN)) / np.float32(PIXEL_STD)
    return scaled[:, None]


def _say(text: str) -> None:
    print(f"mnist_data: {text}", file=sys.stderr, flush=True)
