"""Workloads by name, and the readers of what they train on."""

from __future__ import annotations

import importlib
import struct
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from qsgd_hpc._data import data as shipped
from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.define.definition import FRAMEWORKS, find_workload, workload_names

FOLDER = Path(str(shipped("scaling").joinpath("workloads")))
READERS = ("data", "images", "options", "words", "zaremba")


@pytest.fixture(scope="module")
def readers() -> Iterator[SimpleNamespace]:
    """Import the scripts' siblings as a script does, and leave no trace of it."""
    sys.path.insert(0, str(FOLDER))
    found: dict[str, ModuleType] = {name: importlib.import_module(name) for name in READERS}
    yield SimpleNamespace(**found)
    sys.path.remove(str(FOLDER))
    for name in READERS:
        del sys.modules[name]


# --- by name


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_name_stands_for_a_script_that_is_shipped(framework: str) -> None:
    assert len(workload_names(framework)) >= 9
    for name in workload_names(framework):
        found = find_workload(name, framework)
        assert found.script.is_file() and found.script.parent.name == framework
        assert found.unit in ("images", "words")
        compile(found.script.read_text(), str(found.script), "exec")


def test_sizes_of_one_network_differ_by_their_arguments() -> None:
    assert find_workload("ptb-large", "torch").args == ("--size", "large")
    assert find_workload("resnet50", "keras").args == ("--network", "resnet50")


def test_an_unknown_name_is_answered_with_the_nearest_and_with_all() -> None:
    with pytest.raises(UsageError) as error:
        find_workload("resnet", "torch")
    assert "Did you mean 'resnet50'?" in str(error.value)
    assert all(name in str(error.value) for name in workload_names())


def test_alexnet_is_not_to_be_had_in_keras_and_the_error_says_where_it_is() -> None:
    with pytest.raises(UsageError, match=r"only for torch. Workloads for keras: mnist"):
        find_workload("alexnet", "keras")


# --- images


def write_idx(folder: Path, part: str, count: int) -> None:
    images = np.arange(count * 784, dtype=np.uint8).reshape(count, 28, 28)
    header = struct.pack(">4I", 0x803, count, 28, 28)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
    labels = (np.arange(count) % 10).astype(np.uint8)
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(
        struct.pack(">2I", 0x801, count) + labels.tobytes()
    )


def write_photos(folder: Path, *, test: str, classes: int = 3) -> None:
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 6), (test, 2)):
        for label in range(classes):
            place = folder / part / f"class{label}"
            place.mkdir(parents=True)
            for n in range(count):
                one = image.new("RGB", (50, 40), (60 * label,) * 3)
                one.save(place / f"{n}.jpg")


def test_mnist_is_read_from_idx_files(readers: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    for part, count in (("train", 20), ("t10k", 5)):
        write_idx(tmp_path / "mnist", part, count)
    data = readers.images.mnist(tmp_path)
    assert (len(data.train), len(data.test), data.classes) == (20, 5, 10)
    pixels, labels = data.train.take(np.array([3, 1]))
    assert pixels.shape == (2, 28, 28, 1) and pixels.dtype == np.uint8
    assert labels.tolist() == [3, 1] and pixels[1, 0, 0, 0] == 784 % 256


@pytest.mark.parametrize("content", [b"", b"\0\0\x08", b"\0\0\x08\x03\0\0", b"junkjunkjunkjunk"])
def test_a_damaged_file_is_named(readers: SimpleNamespace, tmp_path: Path, content: bytes) -> None:
    for part in ("train", "t10k"):
        write_idx(tmp_path, part, 4)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(content)
    with pytest.raises(readers.data.DataError, match="t10k-labels-idx1-ubyte: not a whole IDX"):
        readers.images.mnist(tmp_path)


@pytest.mark.parametrize("test", ["test", "val"])
def test_a_tree_of_jpeg_files_is_cut_square_and_scaled(
    readers: SimpleNamespace, tmp_path: Path, test: str
) -> None:
    write_photos(tmp_path / "imagenet", test=test)
    data = readers.images.photos(tmp_path, 24, None)
    assert (data.name, data.classes) == ("imagenet", 3)
    assert (len(data.train), len(data.test)) == (18, 6)
    pixels, labels = data.train.take(np.array([0, 17]))
    assert pixels.shape == (2, 24, 24, 3) and labels.tolist() == [0, 2]
    assert pixels[0].max() < 5 and abs(int(pixels[1].mean()) - 120) < 5


def test_an_archive_holds_what_its_tree_does_and_is_32_pixels_by_itself(
    readers: SimpleNamespace, tmp_path: Path
) -> None:
    write_photos(tmp_path / "tree", test="test")
    with tarfile.open(tmp_path / "cifar10.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "tree", "cifar10")
    data = readers.images.photos(tmp_path, None, 7)
    assert (data.name, data.train.size) == ("cifar10", 32)
    assert (len(data.train), len(data.test)) == (9, 3)  # three of each class, and one to test
    assert data.train.take(np.arange(9))[0].shape == (9, 32, 32, 3)


def test_classes_that_no_test_image_has_are_an_error(
    readers: SimpleNamespace, tmp_path: Path
) -> None:
    write_photos(tmp_path, test="test")
    (tmp_path / "train" / "more").mkdir()
    with pytest.raises(readers.data.DataError, match="4 classes to train on and 3 to test with"):
        readers.images.photos(tmp_path, None, None)


def test_absent_data_is_an_error_with_both_remedies(readers: SimpleNamespace) -> None:
    nowhere = Path("/nowhere")
    images, words = readers.images, readers.words
    for read, folder in ((images.mnist, nowhere), (words.ptb, nowhere), (words.ptb, None)):
        with pytest.raises(readers.data.DataError, match=r"--data DIR.*--synthetic"):
            read(folder)


def test_digits_stand_in_for_images_where_no_folder_is_named(readers: SimpleNamespace) -> None:
    pytest.importorskip("sklearn")
    small, large = readers.images.mnist(None), readers.images.photos(None, 64, 100)
    for found, count, size, channels in ((small, 1500, 28, 1), (large, 100, 64, 3)):
        assert (found.name, found.classes) == ("digits", 10)
        assert (len(found.train), len(found.test)) == (count, 297)
        pixels, labels = found.test.take(np.arange(297))
        assert pixels.shape == (297, size, size, channels) and pixels.dtype == np.uint8
        assert pixels.max() == 255 and set(labels) == set(range(10))
    # Each of the 8 x 8 cells of the picture is one grey.
    (picture,), _ = large.train.take(np.arange(1))
    assert (picture[::8, ::8, 0] == picture[7::8, 7::8, 2]).all()


def test_made_up_images_are_the_same_each_time_and_few_in_memory(
    readers: SimpleNamespace,
) -> None:
    one, two = (readers.images.synthetic(1000, 224, 3, None) for _ in range(2))
    assert one.train.pixels.nbytes < 32 << 20 and len(one.train) == 2048
    chosen = np.array([5, 5 + 128])
    pixels, labels = one.train.take(chosen)
    assert (pixels == two.train.take(chosen)[0]).all()
    assert labels[0] == labels[1] and (pixels[0] == pixels[1]).all()


# --- words


def test_a_rows_next_window_reads_on_where_the_last_one_ends(readers: SimpleNamespace) -> None:
    """Ranks together read every row of the text, whatever their number."""
    text = np.arange(103)
    one = readers.words.windows(text, 4, 5, rank=0, ranks=1)
    assert len(one) == 4  # rows of 25 words, the last of which has no follower
    assert one[0][0][1].tolist() == [25, 26, 27, 28, 29]
    assert one[0][1][1].tolist() == [26, 27, 28, 29, 30]
    assert one[1][0][1].tolist() == [30, 31, 32, 33, 34]
    parts = [readers.words.windows(text, 4, 5, rank=r, ranks=3) for r in range(3)]
    rows = np.concatenate([part[0][0] for part in parts])
    assert sorted(rows[:, 0].tolist()) == one[0][0][:, 0].tolist()


@pytest.mark.parametrize(("rows", "ranks"), [(2, 3), (40, 1)])
def test_too_few_words_are_an_error_with_the_batches_that_fit(
    readers: SimpleNamespace, rows: int, ranks: int
) -> None:
    with pytest.raises(readers.data.DataError, match=f"between {ranks} and 16"):
        readers.words.windows(np.arange(100), rows, 5, rank=0, ranks=ranks)


def test_ptb_is_numbered_in_the_order_of_its_words(
    readers: SimpleNamespace, tmp_path: Path
) -> None:
    (tmp_path / "ptb.train.txt").write_text(" the cat sat \n the dog \n")
    (tmp_path / "ptb.valid.txt").write_text(" dog cat \n")
    (tmp_path / "ptb.test.txt").write_text(" sat \n")
    text = readers.words.ptb(tmp_path)
    assert text.vocabulary == 5 and text.train.tolist() == [0, 1, 2, 3, 0, 4, 3]
    assert text.valid.tolist() == [4, 1, 3] and text.test.tolist() == [2, 3]


@pytest.mark.parametrize(("epoch", "rate"), [(0, 2.0), (3, 2.0), (4, 1.0), (5, 0.5)])
def test_the_small_models_rate_halves_after_four_epochs(
    readers: SimpleNamespace, epoch: int, rate: float
) -> None:
    small = readers.zaremba.SIZES["small"]
    assert readers.zaremba.rate(small, 80, epoch, 9, 10) == rate
    assert readers.zaremba.rate(small, 20, 0, 0, 10) == 1.0


# --- what all workloads do


def test_ranks_share_each_batch_and_all_draw_the_same_order(readers: SimpleNamespace) -> None:
    def cut(ranks: int) -> list[list[int]]:
        shards = readers.data.shards
        parts = [list(shards(50, 8, rank=r, ranks=ranks, seed=3)) for r in range(ranks)]
        return [sorted(np.concatenate(step).tolist()) for step in zip(*parts, strict=True)]

    assert cut(1) == cut(3) and len(cut(1)) == 6


def test_an_error_while_reading_ahead_arrives_after_what_was_read(
    readers: SimpleNamespace,
) -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise OSError("the disk is gone")

    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        for item in readers.data.prefetch(items()):
            seen.append(item)
    assert seen == [0, 1, 2, 3, 4]


def test_reading_ahead_ends_when_nobody_takes_any_more(readers: SimpleNamespace) -> None:
    taken = []

    def items() -> Iterator[int]:
        for i in range(10**9):
            taken.append(i)
            yield i

    ahead = readers.data.prefetch(items(), depth=2)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    ahead.close()
    assert len(taken) < 10  # three given, two in the queue, one in hand


@pytest.mark.parametrize("arguments", [["--batch-size", "0"], ["--epochs", "x"], ["--bits", "9"]])
def test_wrong_options_are_refused(readers: SimpleNamespace, arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        readers.options.parser("x", epochs=1, batch=8).parse_args(arguments)


def test_a_batch_is_that_of_a_rank_or_of_all(readers: SimpleNamespace) -> None:
    parser = readers.options.parser("x", epochs=1, batch=8)
    batches = {(): 32, ("--batch-size", "3"): 12, ("--global-batch-size", "5"): 5}
    for arguments, batch in batches.items():
        assert readers.options.global_batch(parser.parse_args(arguments), 4) == batch
    with pytest.raises(SystemExit):
        parser.parse_args(["--batch-size", "3", "--global-batch-size", "5"])


def test_the_learning_rate_rises_and_falls(readers: SimpleNamespace) -> None:
    rates = [readers.options.learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates.index(max(rates)) == 10 and max(rates) == 1.0
    assert 0 < rates[0] < 0.1 and 0 < rates[-1] < 0.02
    assert readers.options.learning_rate(0, 1, 1.0) == 1.0
