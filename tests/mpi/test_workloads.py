"""The workloads of scaling studies, as a study starts them: on two ranks, small and short."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from qsgd_hpc.scaling.define.definition import find_workload

pytest.importorskip("torch")
pytestmark = pytest.mark.one_mpi
Run = Callable[..., CompletedProcess[str]]

FINAL = {
    "ranks", "throughput", "unit", "steps", "warmup_steps", "warmup_rule", "step_s", "step_mean_s",
    "compute_s", "exposed_s", "data_s", "hidden_s", "coding_s", "comm_s", "step_jitter",
    "wire_bytes", "gradient_bytes", "comm_time_s", "nmse", "global_batch_size", "dataset",
    "parameters", "bits", "algorithm", "layers", "backward_s", "hosts", "gpu", "threads",
}  # fmt: skip
TINY = ("--synthetic", "--steps", "4", "--bits", "4")
PHOTOS = ("--width", "8", "--image-size", "32", "--classes", "10", "--batch-size", "4")


def train(
    run_ranks: Run, folder: Path, workload: str, framework: str, *options: str, **environ: str
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Run a workload on two ranks; return its final record, and all records by event."""
    found = find_workload(workload, framework)
    path = folder / "records.jsonl"
    command = [str(found.script), *found.args, *options]
    ended = run_ranks(2, *command, QSGD_RECORDS=str(path), **environ)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    records: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        each = json.loads(line)
        records.setdefault(each["event"], []).append(each)
    (final,) = records["final"]
    assert final["unit"] == found.unit
    return final, records


def check(final: dict[str, Any], records: dict[str, list[dict[str, Any]]], quality: str) -> None:
    """Check what holds for a short training of every workload."""
    assert set(final) >= {*FINAL, quality, "train_loss"}
    parts = final["compute_s"] + final["exposed_s"] + final["data_s"]
    assert parts == pytest.approx(final["step_mean_s"])
    assert min(final["compute_s"], final["throughput"], final[quality]) > 0
    assert min(final["exposed_s"], final["hidden_s"], final["coding_s"]) >= 0
    assert (final["ranks"], final["bits"], final["dataset"]) == (2, 4, "synthetic")
    assert 0 < final["wire_bytes"] < final["gradient_bytes"] / 3 and final["nmse"] > 0
    raw = [len(each["seconds"]) for each in records["steps"]]
    assert sum(raw) == final["steps"] and len(raw) == len(records["epoch"])
    # All that is learnt is exchanged, in one late step as in any.
    assert sum(elements for elements, _ in final["layers"]) == final["parameters"]
    assert final["backward_s"] == pytest.approx(final["layers"][-1][1], abs=1e-5)


@pytest.mark.parametrize(
    ("workload", "quality", "options"),
    [
        pytest.param("mnist", "test_accuracy", (), marks=pytest.mark.gate),
        ("resnet34", "test_accuracy", PHOTOS),
        ("resnet50", "test_accuracy", PHOTOS),
        ("ptb-small", "perplexity", ("--global-batch-size", "5")),
    ],
)
def test_a_torch_workload_trains_and_tells_all_that_a_study_reads(
    run_ranks: Run, tmp_path: Path, workload: str, quality: str, options: tuple[str, ...]
) -> None:
    final, records = train(run_ranks, tmp_path, workload, "torch", *TINY, *options)
    check(final, records, quality)
    assert (final["steps"], final["warmup_steps"]) == (4, 2)
    if workload.startswith("ptb"):
        assert min(final["test_perplexity"], final["train_perplexity"]) > 1


def test_the_keras_workload_trains_and_tells_all_that_a_study_reads(
    run_ranks: Run, tmp_path: Path
) -> None:
    pytest.importorskip("tensorflow")
    final, records = train(
        run_ranks, tmp_path, "mnist", "keras", "--synthetic", "--steps", "6", "--bits", "4",
        "--global-batch-size", "33",
    )  # fmt: skip
    check(final, records, "test_accuracy")
    assert final["global_batch_size"] == 33 and final["compute_only_s"] > 0


def test_mnist_is_learnt_in_less_than_half_a_pass(run_ranks: Run, tmp_path: Path) -> None:
    folder = Path(os.environ.get("QSGD_DATA", "-"))
    if not any(folder.glob("mnist/train-images*")):
        pytest.skip("needs the 60,000 MNIST images: point QSGD_DATA at the folder of mnist/")
    final, _ = train(run_ranks, tmp_path, "mnist", "torch", "--steps", "200", QSGD_DATA=str(folder))
    assert final["test_accuracy"] > 0.97 and final["dataset"] == "mnist"


def test_what_is_trained_does_not_depend_on_the_number_of_ranks(
    run_ranks: Run, tmp_path: Path
) -> None:
    """The same weights to begin with, and the same batches, cut for one rank or for three."""
    losses = []
    script = str(find_workload("mnist", "torch").script)
    for ranks in (1, 3):
        path = tmp_path / f"{ranks}.jsonl"
        options = ("--synthetic", "--steps", "6", "--global-batch-size", "16", "--no-eval")
        assert run_ranks(ranks, script, *options, QSGD_RECORDS=str(path)).returncode == 0
        lines = map(json.loads, path.read_text().splitlines())
        (loss,) = [each["train_loss"] for each in lines if each["event"] == "epoch"]
        losses.append(loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(
    ("workload", "options", "remedy"),
    [
        ("mnist", ("--data", "/nowhere"), "train on made-up data with --synthetic"),
        ("ptb-small", ("--data", "/nowhere"), "ptb.valid.txt and ptb.test.txt by --data DIR"),
        ("mnist", ("--synthetic", "--global-batch-size", "1"), "between 2 and 2048"),
    ],
)
def test_what_cannot_be_trained_ends_in_one_line_with_the_remedy(
    run_ranks: Run, workload: str, options: tuple[str, ...], remedy: str
) -> None:
    found = find_workload(workload, "torch")
    ended = run_ranks(2, str(found.script), *found.args, *options)
    assert ended.returncode == 1
    assert ended.stderr.count(remedy) == 1 and "Traceback" not in ended.stderr


def test_a_network_of_torchvision_trains_or_says_what_to_install(
    run_ranks: Run, tmp_path: Path
) -> None:
    options = ("--classes", "10", "--image-size", "64", "--batch-size", "2")
    found = find_workload("alexnet", "torch")
    ended = run_ranks(2, str(found.script), *found.args, *TINY, *options)
    if ended.returncode:
        assert ended.stderr.count("from torchvision, which cannot be imported") == 1
        assert "Traceback" not in ended.stderr
    else:
        assert "images/s; a step of" in ended.stdout
