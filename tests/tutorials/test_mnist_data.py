"""The MNIST lesson's data module: IDX files, downloads from a local server, the digits."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

LESSON = Path(__file__).parents[2] / "tutorials" / "mnist_torch"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mnist_data", LESSON / "mnist_data.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["mnist_data"] = module  # dataclasses looks its annotations up there
    spec.loader.exec_module(module)
    return module


mnist_data = _load()


def _images(count: int, side: int = 28) -> bytes:
    pixels = bytes(i % 251 for i in range(count * side * side))
    return struct.pack(">4I", 0x803, count, side, side) + pixels


def _labels(count: int) -> bytes:
    return struct.pack(">2I", 0x801, count) + bytes(i % 10 for i in range(count))


def _write_set(folder: Path, *, train: int = 20, test: int = 10, packed: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("t10k", test)):
        for kind, data in (("images-idx3", _images(count)), ("labels-idx1", _labels(count))):
            name = f"{part}-{kind}-ubyte"
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / name).write_bytes(data)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("place", ["", "mnist", "MNIST/raw"])
def test_mnist_is_found_plain_or_packed_in_the_usual_places(
    tmp_path: Path, place: str, packed: bool
) -> None:
    _write_set(tmp_path / place, packed=packed)
    data = mnist_data.load(tmp_path)
    assert data.name == "mnist"
    assert data.train_images.shape == (20, 1, 28, 28) and data.train_images.dtype == np.float32
    assert data.test_labels.tolist() == list(range(10)) and data.test_labels.dtype == np.int64


def test_pixels_are_normalised_once(tmp_path: Path) -> None:
    _write_set(tmp_path)
    first = mnist_data.load(tmp_path).train_images[0, 0, 0, :3]
    assert first == pytest.approx((np.arange(3) / 255 - 0.1307) / 0.3081, rel=1e-6)


def test_a_set_with_one_file_missing_is_not_found(tmp_path: Path) -> None:
    _write_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    assert mnist_data.find(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "expected", "found"),
    [
        (b"", "00 00 08 03", "found 0 bytes"),
        (b"<html>404</html>", "00 00 08 03", "3c 68 74 6d"),
        (_labels(4), "00 00 08 03", "00 00 08 01"),
        (_images(2)[:10], "16 bytes of header", "found 10 bytes"),
        (_images(2)[:-5], "2 x 28 x 28 = 1568 bytes", "found 1563"),
        (_images(2) + b"\0", "2 x 28 x 28 = 1568 bytes", "found 1569"),
    ],
    ids=["empty", "html", "labels", "header cut", "data cut", "trailing byte"],
)
def test_a_damaged_idx_file_is_named_with_what_was_expected_and_found(
    tmp_path: Path, content: bytes, expected: str, found: str
) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(mnist_data.DataError) as caught:
        mnist_data.read_idx(path, 0x803)
    assert str(path) in str(caught.value)
    assert expected in str(caught.value) and found in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-20],
        lambda b: b"not gzip at all",
        lambda b: b"",
        lambda b: b[:40] + bytes(20) + b[60:],
    ],
    ids=["cut", "not gzip", "empty", "bytes changed"],
)
def test_a_damaged_gzip_file_is_named(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    assert callable(damage)
    path.write_bytes(damage(gzip.compress(_images(3))))
    with pytest.raises(mnist_data.DataError, match=r"train-images-idx3-ubyte\.gz"):
        mnist_data.read_idx(path, 0x803)


def test_an_idx_header_beyond_64_bits_is_an_error_not_an_overflow(tmp_path: Path) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(struct.pack(">4I", 0x803, 2**31, 2**31, 4))  # the product wraps to 0
    with pytest.raises(mnist_data.DataError, match="18446744073709551616 bytes"):
        mnist_data.read_idx(path, 0x803)


def test_images_and_labels_must_fit_each_other(tmp_path: Path) -> None:
    _write_set(tmp_path, packed=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(_labels(19))
    with pytest.raises(mnist_data.DataError, match=r"\(20, 28, 28\).*\(19,\)"):
        mnist_data.load(tmp_path)


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Serve a folder over HTTP, as a mirror does."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", folder
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the small set that the tests write be the one that the checksums tell of."""
    contents = {
        "train-images-idx3-ubyte": _images(20),
        "train-labels-idx1-ubyte": _labels(20),
        "t10k-images-idx3-ubyte": _images(10),
        "t10k-labels-idx1-ubyte": _labels(10),
    }
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    monkeypatch.setattr(mnist_data, "FILES", digests)


@pytest.mark.usefixtures("checksums")
def test_a_download_leaves_the_four_files_and_nothing_else(
    tmp_path: Path, mirror: tuple[str, Path]
) -> None:
    url, served = mirror
    _write_set(served)
    target = tmp_path / "new" / "folder"
    mnist_data.download(target, [f"{url}/absent", url])  # the first mirror answers 404
    assert sorted(p.name for p in target.iterdir()) == sorted(f"{n}.gz" for n in mnist_data.FILES)
    assert mnist_data.load(target).train_images.shape == (20, 1, 28, 28)


@pytest.mark.usefixtures("checksums")
def test_a_mirror_with_other_bytes_is_refused_and_leaves_nothing(
    tmp_path: Path, mirror: tuple[str, Path]
) -> None:
    url, served = mirror
    _write_set(served, train=21)
    with pytest.raises(
        mnist_data.DataError, match=r"expected SHA-256 [0-9a-f]{64} unpacked, found"
    ):
        mnist_data.download(tmp_path / "out", [url])
    assert list((tmp_path / "out").iterdir()) == []


def test_without_network_prepare_says_so_and_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mnist_data, "MIRRORS", ("http://127.0.0.1:9",))
    assert mnist_data.prepare(tmp_path / "out") is False
    assert str(tmp_path / "out") in capsys.readouterr().err


def test_prepare_downloads_nothing_when_the_files_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_set(tmp_path)
    monkeypatch.setattr(mnist_data, "download", lambda folder: pytest.fail("downloaded"))
    assert mnist_data.prepare(tmp_path) is True


def test_the_checksums_are_those_of_the_real_files(real_mnist: Path) -> None:
    found = mnist_data.find(real_mnist)
    assert found is not None
    for name, path in found.items():
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert hashlib.sha256(data).hexdigest() == mnist_data.FILES[name]


@pytest.fixture
def real_mnist() -> Path:
    folder: Path = mnist_data.data_dir(None)
    if mnist_data.find(folder) is None:
        pytest.skip(f"no MNIST in {folder}; point QSGD_DATA at its folder")
    return folder


def test_digits_are_enlarged_without_changing_their_brightness_range() -> None:
    pytest.importorskip("sklearn")
    data = mnist_data.load(None)
    assert data.name == "digits"
    assert data.train_images.shape == (1500, 1, 28, 28)
    assert data.test_images.shape == (297, 1, 28, 28)
    raw = data.train_images * 0.3081 + 0.1307
    assert raw.min() >= -1e-6 and 0.9 < raw.max() <= 1 + 1e-6
    assert set(data.test_labels.tolist()) == set(range(10))


@pytest.mark.parametrize("ranks", range(1, 8))
@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 128, 297])
def test_strided_shards_cover_every_image_exactly_once(ranks: int, count: int) -> None:
    order = np.random.default_rng(1).permutation(count)
    shards = [order[rank::ranks] for rank in range(ranks)]
    assert sorted(np.concatenate(shards).tolist()) == list(range(count))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "'0': expected a whole number, at least 1"),
        # Each begins by importing torch.
        pytest.param(
            ["--batch-size", "many"],
            "'many': expected a whole number, at least 1",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--lr", "nan"], "--lr nan: expected a positive number", marks=pytest.mark.full
        ),
        (["--resume"], "--resume needs --checkpoint FILE"),
    ],
)
def test_the_serial_script_answers_a_wrong_option_without_traceback(
    arguments: list[str], message: str
) -> None:
    pytest.importorskip("torch")
    ended = subprocess.run(
        [sys.executable, LESSON / "train_mnist.py", *arguments], capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert message in ended.stderr and "Traceback" not in ended.stderr
