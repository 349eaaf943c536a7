"""The ResNet lesson's data module and network: JPEG trees, archives, damaged files, digits."""

from __future__ import annotations

import importlib.util
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

LESSON = Path(__file__).parents[2] / "tutorials" / "resnet34_torch"
CLASSES = [f"class{i}" for i in range(10)]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, LESSON / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses looks its annotations up there
    spec.loader.exec_module(module)
    return module


cifar_data = _load("cifar_data")


def _write_tree(folder: Path, *, train: int = 5, test: int = 2) -> Path:
    """Write one-coloured images: class i has brightness 20 i."""
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", train), ("test", test)):
        for i, label in enumerate(CLASSES):
            (folder / part / label).mkdir(parents=True)
            for n in range(count):
                one = image.new("RGB", (32, 32), (20 * i, 20 * i, 20 * i))
                one.save(folder / part / label / f"{n:04}.jpg")
    return folder


def _pack(tree: Path, archive: Path) -> Path:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(tree, "cifar10")
    return archive


@pytest.mark.parametrize("packed", [False, True])
def test_tree_and_archive_give_the_same_images(tmp_path: Path, packed: bool) -> None:
    tree = _write_tree(tmp_path / "cifar10")
    source = cifar_data.find(tmp_path)
    assert source == tree
    if packed:
        _pack(tree, tmp_path / "other" / "cifar10.tar.xz")
        source = cifar_data.find(tmp_path / "other")
    data = cifar_data.load(source, 30)
    assert data.name == "cifar10"
    assert data.train_images.shape == (30, 3, 32, 32) and data.train_images.dtype == np.uint8
    assert data.test_images.shape == (10, 3, 32, 32)
    assert np.bincount(data.train_labels).tolist() == [3] * 10
    brightness = data.train_images.mean(axis=(1, 2, 3))
    assert np.allclose(brightness, 20 * data.train_labels, atol=2)


def test_more_images_than_there_are_means_all(tmp_path: Path) -> None:
    _write_tree(tmp_path, train=3, test=1)
    data = cifar_data.load(cifar_data.find(tmp_path), 50_000)
    assert (len(data.train_labels), len(data.test_labels)) == (30, 10)


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    _write_tree(tmp_path)
    path = tmp_path / "train" / "class3" / "0001.jpg"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(cifar_data.DataError, match=r"class3/0001\.jpg: not a whole JPEG"):
        cifar_data.load(tmp_path, 50)


def test_an_image_of_another_size_is_named(tmp_path: Path) -> None:
    _write_tree(tmp_path)
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (31, 32)).save(tmp_path / "test" / "class9" / "0000.jpg")
    with pytest.raises(cifar_data.DataError, match=r"class9/0000\.jpg: expected 32 x 32 pixels"):
        cifar_data.load(tmp_path, 50)


def test_a_missing_class_is_an_error(tmp_path: Path) -> None:
    _write_tree(tmp_path)
    for path in (tmp_path / "test" / "class4").iterdir():
        path.unlink()
    with pytest.raises(cifar_data.DataError, match="expected ten classes"):
        cifar_data.load(tmp_path, 50)


@pytest.mark.parametrize("keep", [0, 40, 400])
def test_a_cut_archive_is_named(tmp_path: Path, keep: int) -> None:
    archive = _pack(_write_tree(tmp_path / "tree"), tmp_path / "cifar10.tar.xz")
    archive.write_bytes(archive.read_bytes()[:keep])
    with pytest.raises(cifar_data.DataError, match=r"cifar10\.tar\.xz"):
        cifar_data.load(archive, 50)


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert cifar_data.find(None) is None
    assert cifar_data.find(tmp_path) is None
    assert cifar_data.find(tmp_path / "absent") is None


def test_digits_fill_32_by_32_colour_images() -> None:
    pytest.importorskip("sklearn")
    data = cifar_data.load(None, 2000)
    assert data.name == "digits"
    assert data.train_images.shape == (1500, 3, 32, 32) and data.train_images.dtype == np.uint8
    assert data.train_images.max() == 255 and len(data.test_labels) == 297
    assert cifar_data.load(None, 100).train_images.shape == (100, 3, 32, 32)


def test_resnet34_has_the_papers_depth_and_size() -> None:
    torch = pytest.importorskip("torch")
    network = _load("resnet").resnet34(64, classes=10)
    convolutions = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d)]
    main_path = [m for m in convolutions if m.kernel_size == (3, 3)]
    assert len(main_path) + 1 == 34  # and the linear layer
    assert sum(p.numel() for p in network.parameters()) == 21_282_122
    assert _load("resnet").resnet34(4)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
