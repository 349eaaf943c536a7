"""Libraries that wrap models themselves: unchanged, with a line of ours, and resumed elsewhere."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.mpi.ecosystem import KINDS, SCRIPT, STEPS, WRAPPED, printed, under_torchrun
from tests.processes import without_settings

for library in ("lightning", "transformers", "accelerate"):
    pytest.importorskip(library, reason="make ecosystem")


def lines(done: subprocess.CompletedProcess[str], ranks: int) -> list[Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    return printed(done.stdout, ranks)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_four_bits_learn_what_32_do_as_under_torchrun(run_ranks, tmp_path: Path, kind: str) -> None:
    runs = {
        bits: lines(run_ranks(2, SCRIPT, kind, bits, STEPS, str(tmp_path / bits)), 2)
        for bits in ("32", "4")
    }
    (_, loss, digest, *_), (steps, coded, other, *_) = runs["32"], runs["4"]
    assert steps == int(STEPS)
    assert loss < 2.25  # it begins at 2.32
    assert other != digest
    assert coded == pytest.approx(loss, abs=2e-3)
    for bits, run in runs.items():
        assert run == under_torchrun(kind, bits)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_on_hosts_of_their_own_train_as_under_torchrun(
    hosts_of_their_own: None, run_ranks, tmp_path: Path, kind: str
) -> None:
    options = ("--network", "1gbit", SCRIPT, kind, "4", STEPS, str(tmp_path / "saved"))
    assert lines(run_ranks(2, *options), 2) == under_torchrun(kind, "4")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_trains_as_under_torchrun(python: str, tmp_path: Path, kind: str) -> None:
    def job(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-m", "qsgd_hpc", *words],
            cwd=tmp_path,
            env={**without_settings(), "QSGD_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    size = ("--site", "local", "--ranks-per-node", "2")
    submitted = job("submit", *size, SCRIPT, kind, "32", STEPS, str(tmp_path / "saved"))
    assert submitted.returncode == 0, submitted.stderr
    ended = job("wait", "local-1")
    assert ended.returncode == 0, ended.stdout + job("logs", "local-1").stdout
    assert lines(job("logs", "local-1"), 2) == under_torchrun(kind, "32")


@pytest.mark.one_mpi
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["ddp", *WRAPPED, "fsdp", "lightning-fsdp"])
def test_bits_do_to_an_unchanged_script_what_the_line_does(
    run_ranks, tmp_path: Path, kind: str
) -> None:
    line = lines(run_ranks(2, SCRIPT, kind, "4", STEPS, str(tmp_path / "line")), 2)
    sharded = "fsdp" in kind
    options = ("--bits", "4", *(("--weight-bits", "8") if sharded else ()))
    done = run_ranks(2, *options, SCRIPT, kind, "32", STEPS, str(tmp_path / "flag"))
    steps, loss, digest = lines(done, 2)[:3]
    if kind == "lightning-fsdp":
        # The line names parameters from Lightning's module on, the flag from the sharded one within
        # it: that is other noise.
        assert steps == line[0]
        assert loss == pytest.approx(line[1], abs=2e-3)
    else:
        assert [steps, loss, digest] == line[:3]
    said = "FSDP2 sends weights in 8 bits and" if sharded else "DDP sends"
    assert done.stderr.count(f"qsgd-hpc: {said} gradients in 4 bits") == 1


@pytest.mark.one_mpi
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", WRAPPED)
def test_a_checkpoint_carries_what_is_held_back_to_other_ranks(
    run_ranks, tmp_path: Path, kind: str
) -> None:
    first = tmp_path / "first"
    *_, held = lines(run_ranks(2, SCRIPT, kind, "4", "6", str(first)), 2)
    saved = first / "checkpoint-6" if kind == "trainer" else first
    done = run_ranks(3, SCRIPT, kind, "4", "9", str(tmp_path / "second"), str(saved))
    _, loss, _, loaded, _ = lines(done, 3)
    assert loaded == held > 1
    assert loss < 2.25


@pytest.mark.one_mpi
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["lightning", "accelerate", "trainer"])
def test_checkpoints_with_and_without_the_line_are_interchangeable(
    run_ranks, tmp_path: Path, kind: str
) -> None:
    for number, (bits, then) in enumerate([("32", "4"), ("4", "32")]):
        first, second = (str(tmp_path / f"{name}{number}") for name in ("first", "second"))
        assert run_ranks(2, SCRIPT, kind, bits, "4", first).returncode == 0
        saved = f"{first}/checkpoint-4" if kind == "trainer" else first
        done = run_ranks(2, SCRIPT, kind, then, "6", second, saved)
        lines(done, 2)
        assert done.stderr.count("error feedback starts from zero") == (then == "4")


@pytest.mark.one_mpi
def test_accelerate_without_a_gpu_is_told_that_it_trains_alone(run_ranks, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    text = Path(SCRIPT).read_text().replace("cpu=True, ", "")
    path.write_text(text)
    done = run_ranks(2, str(path), "accelerate", "32", "2", str(tmp_path / "out"))
    told = [line for line in done.stderr.splitlines() if "trains separately" in line]
    assert len(told) == 1, done.stderr
    assert "Accelerator(cpu=True)" in told[0]
    refused = run_ranks(2, str(path), "accelerate", "4", "2", str(tmp_path / "out"))
    assert refused.returncode != 0
    assert "2 ranks were started" in refused.stderr


TWO_MODELS = """
import sys
import torch
from accelerate import Accelerator
from qsgd_hpc.torch.accelerate import compress

for load in (False, True):
    accelerator = Accelerator(cpu=True)
    models = [torch.nn.Linear(64, outputs) for outputs in (32, 48)]
    *models, optimizer = accelerator.prepare(
        *models, torch.optim.SGD([p for m in models for p in m.parameters()], 0.1)
    )
    hooks = [compress(accelerator, model) for model in models]
    if load:
        accelerator.load_state(sys.argv[1])
    accelerator.backward(sum(model(torch.randn(4, 64)).square().mean() for model in models))
    optimizer.step()
    accelerator.save_state(sys.argv[1])
    optimizer.zero_grad()
sizes = {h.file: [len(p.get("owed", ())) for p in h.state_dict()["parameters"].values()]
         for h in hooks}
accelerator.print(sizes)
accelerator.end_training()
"""


@pytest.mark.one_mpi
def test_each_compressed_model_of_accelerate_has_its_own_residuals(
    run_ranks, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(TWO_MODELS)
    done = run_ranks(2, str(path), str(tmp_path / "saved"))
    assert done.returncode == 0, done.stderr
    assert "{'qsgd_hpc.pt': [0, 2048], 'qsgd_hpc_1.pt': [0, 3072]}" in done.stdout
