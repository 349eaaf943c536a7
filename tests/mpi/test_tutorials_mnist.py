"""The lessons as their readers run them: real ranks, started by the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.one_mpi
TUTORIALS = Path(__file__).parents[2] / "tutorials"
MNIST = str(TUTORIALS / "mnist_torch" / "train_mnist_hvd.py")
RESNET = str(TUTORIALS / "resnet34_torch" / "train_resnet34.py")
FINAL = {
    "ranks", "images_per_s", "test_accuracy", "wire_bytes", "gradient_bytes", "comm_time_s",
    "steps", "global_batch_size", "dataset",
}  # fmt: skip
EPOCH = {"epoch", "images", "seconds", "images_per_s", "train_loss", "test_accuracy"}
Run = Callable[..., CompletedProcess[str]]


def _events(path: Path) -> list[dict[str, Any]]:
    """Return what the script records; the engine of every rank adds a line of its own."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in events if event["event"] != "engine"]


@pytest.fixture
def small_mnist(tmp_path: Path) -> str:
    """Write 120 images in MNIST's form: a bright square whose place tells the class."""
    folder = tmp_path / "small"
    folder.mkdir()
    for part, count in (("train", 100), ("t10k", 20)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = np.random.default_rng(count).integers(0, 60, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[label * 2 : label * 2 + 8, label * 2 : label * 2 + 8] = 255
        header = struct.pack(">4I", 0x803, count, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">2I", 0x801, count)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    return str(folder)


def _train(run_ranks: Run, records: Path, ranks: int, *command: str, **more: str) -> dict[str, Any]:
    """Run a script to its end and return its final record."""
    ended = run_ranks(ranks, *command, QSGD_RECORDS=str(records), timeout_s=1500, **more)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return _events(records)[-1]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.gate), 3])
def test_the_mnist_lesson_writes_each_epoch_and_one_final_record(
    run_ranks: Run, tmp_path: Path, small_mnist: str, ranks: int
) -> None:
    records = tmp_path / "r.jsonl"
    options = ["--data", small_mnist, "--epochs", "2", "--global-batch-size", "7"]
    final = _train(run_ranks, records, ranks, MNIST, *options)
    *epochs, _ = _events(records)
    assert [e["epoch"] for e in epochs] == [1, 2]
    assert all(set(e) >= EPOCH and e["images"] == 100 for e in epochs)
    assert set(final) >= FINAL
    assert (final["ranks"], final["global_batch_size"], final["dataset"]) == (ranks, 7, "mnist")
    assert final["steps"] == 2 * 15
    assert (final["wire_bytes"] > 0) == (ranks > 1)


def test_the_digits_are_learnt_where_nothing_else_is_to_be_had(
    run_ranks: Run, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn")
    final = _train(run_ranks, tmp_path / "r.jsonl", 2, MNIST, "--digits")
    assert final["dataset"] == "digits"
    assert final["test_accuracy"] > 0.88


@pytest.mark.parametrize("batch", ["50", "3"])
def test_the_number_of_ranks_does_not_change_what_is_learnt(
    run_ranks: Run, tmp_path: Path, small_mnist: str, batch: str
) -> None:
    """A batch of 50 leaves shards of 8 and 7 on seven ranks; one of 3 leaves four ranks without."""
    losses = []
    for ranks in (1, 7):
        records = tmp_path / f"{ranks}.jsonl"
        options = ["--data", small_mnist, "--epochs", "2", "--global-batch-size", batch]
        _train(run_ranks, records, ranks, MNIST, *options, "--lr", "0.01")
        losses.append([e["train_loss"] for e in _events(records)[:-1]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_bits_from_the_launcher_or_the_script_cut_the_bytes_alike(
    run_ranks: Run, tmp_path: Path, small_mnist: str
) -> None:
    def wire_bytes(name: str, before: list[str], after: list[str]) -> int:
        options = ["--data", small_mnist, "--epochs", "2", "--global-batch-size", "5"]
        command = [*before, MNIST, *options, *after]
        sent: int = _train(run_ranks, tmp_path / name, 2, *command)["wire_bytes"]
        return sent

    plain = wire_bytes("plain", [], [])
    launcher = wire_bytes("launcher", ["--bits", "4"], [])
    script = wire_bytes("script", [], ["--bits", "4"])
    off = wire_bytes("off", ["--bits", "4"], ["--bits", "32"])
    assert script == pytest.approx(launcher, rel=0.01)
    assert off == pytest.approx(plain, rel=0.01)
    assert plain / launcher > 6


def test_resuming_after_a_kill_gives_what_an_uninterrupted_run_gives(
    run_ranks: Run, tmp_path: Path, small_mnist: str
) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    options = ["--data", small_mnist, "--epochs", "3", "--batch-size", "5", "--checkpoint"]
    _train(run_ranks, whole, 2, MNIST, *options, str(tmp_path / "whole.pt"))
    killed = str(_killed_in_epoch_3(tmp_path))
    ended = run_ranks(2, killed, *options, str(tmp_path / "parts.pt"), QSGD_RECORDS=str(parts))
    assert ended.returncode == 128 + signal.SIGKILL
    _train(run_ranks, parts, 2, MNIST, *options, str(tmp_path / "parts.pt"), "--resume")
    losses = [[e.get("train_loss") for e in _events(path)[:-1]] for path in (whole, parts)]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert sorted(path.name for path in tmp_path.glob("*.pt*")) == ["parts.pt", "whole.pt"]


def _killed_in_epoch_3(folder: Path) -> Path:
    """Write a script that runs the lesson and kills its rank 0 before epoch 3 is recorded."""
    script = folder / "killed.py"
    script.write_text(
        "import os, runpy, sys\n"
        f"sys.path.insert(0, {str(Path(MNIST).parent)!r})\n"
        "import qsgd_hpc.scaling as scaling\n"
        "true_record = scaling.record\n"
        "def record(event, **fields):\n"
        "    if event == 'epoch' and fields['epoch'] == 3:\n"
        f"        os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
        "    true_record(event, **fields)\n"
        "scaling.record = record\n"
        f"runpy.run_path({MNIST!r}, run_name='__main__')\n"
    )
    return script


@pytest.mark.parametrize("content", [None, b"", b"junk\n"])
def test_a_damaged_checkpoint_ends_in_one_line_and_an_absent_one_in_a_fresh_start(
    run_ranks: Run, tmp_path: Path, small_mnist: str, content: bytes | None
) -> None:
    path = tmp_path / "c.pt"
    if content is not None:
        path.write_bytes(content)
    ended = run_ranks(
        2, MNIST, "--data", small_mnist, "--epochs", "1", "--checkpoint", str(path), "--resume"
    )
    assert "Traceback" not in ended.stderr
    if content is None:
        assert ended.returncode == 0 and "no checkpoint there yet" in ended.stdout
    else:
        assert ended.returncode == 1
        assert ended.stderr.count("not a checkpoint of this network") == 1


@pytest.mark.gate
def test_a_damaged_data_file_is_named_once_without_traceback(
    run_ranks: Run, tmp_path: Path
) -> None:
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / f"{name}-ubyte").write_bytes(b"\0\0\x08\x03")
    ended = run_ranks(2, MNIST, "--data", str(tmp_path))
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("train-images-idx3-ubyte: expected an IDX file") == 1


def test_a_diverged_run_ends_in_the_tensors_name_without_traceback(
    run_ranks: Run, small_mnist: str
) -> None:
    ended = run_ranks(2, MNIST, "--data", small_mnist, "--batch-size", "5", "--lr", "1e30")
    assert ended.returncode == 1
    assert re.search(r"tensor '.*gradient.*' holds NaN or Inf", ended.stderr)
    assert "Traceback" not in ended.stderr


def test_the_resnet_lesson_trains_on_uneven_shards(run_ranks: Run, tmp_path: Path) -> None:
    final = _train(
        run_ranks, tmp_path / "r.jsonl", 3, "--bits", "8", RESNET, "--width", "4", "--images",
        "150", "--epochs", "2", "--global-batch-size", "50",
    )  # fmt: skip
    epochs = _events(tmp_path / "r.jsonl")[:-1]
    assert set(final) >= FINAL and final["steps"] == 6
    assert [e["epoch"] for e in epochs] == [1, 2] and set(epochs[0]) >= EPOCH
    assert epochs[1]["train_loss"] < epochs[0]["train_loss"]


def test_a_batch_larger_than_the_data_is_refused_in_one_line(run_ranks: Run) -> None:
    ended = run_ranks(2, RESNET, "--width", "4", "--images", "60", "--global-batch-size", "61")
    assert ended.returncode == 1
    assert ended.stderr.count("choose --global-batch-size between 2 and 60") == 1
    assert "Traceback" not in ended.stderr


@cache
def _real_mnist() -> str | None:
    folder = os.environ.get("QSGD_DATA")
    names = ("train-images-idx3-ubyte", "mnist/train-images-idx3-ubyte")
    files = [Path(folder or "", name + end) for name in names for end in ("", ".gz")]
    return folder if folder and any(file.is_file() for file in files) else None


@pytest.mark.timeout(1800)
def test_two_ranks_reach_98_5_percent_on_mnist_and_quantising_costs_little(
    run_ranks: Run, tmp_path: Path
) -> None:
    folder = _real_mnist()
    if folder is None:
        pytest.skip("needs the 60,000 MNIST images: point QSGD_DATA at their folder")
    accuracy, wire_bytes = {}, {}
    for bits in (32, 8, 4):
        final = _train(
            run_ranks, tmp_path / f"{bits}.jsonl", 2, "--bits", str(bits), MNIST, "--epochs", "3",
            QSGD_DATA=folder,
        )  # fmt: skip
        assert final["dataset"] == "mnist"
        accuracy[bits], wire_bytes[bits] = final["test_accuracy"], final["wire_bytes"]
    assert accuracy[32] >= 0.985
    assert accuracy[8] >= accuracy[32] - 0.003
    assert accuracy[4] >= accuracy[32] - 0.005
    assert wire_bytes[32] / wire_bytes[4] > 7
