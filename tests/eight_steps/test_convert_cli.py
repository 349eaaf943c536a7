"""``qsgd-hpc convert`` as its users call it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from qsgd_hpc.eight_steps.convert.words import STEPS, step

SERIAL = Path(__file__).parents[1] / "convert" / "serial"
SCRIPT = str(SERIAL / "torch_tensors.py")


def convert(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qsgd_hpc", "convert", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_without_output_the_script_alone_is_on_standard_output(tmp_path):
    done = convert(SCRIPT, "--explain")
    assert done.returncode == 0, done.stderr
    compile(done.stdout, "out.py", "exec")
    assert "Step 3: shard the data" in done.stderr


def test_a_script_is_written_and_what_to_do_next_is_said(tmp_path):
    out = tmp_path / "out.py"
    done = convert(SCRIPT, "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert "import qsgd_hpc.torch as hvd" in out.read_text()
    assert f"qsgd-hpc run -np 2 {out}" in done.stdout
    again = convert(str(out))
    assert again.stdout == out.read_text()
    assert "already distributed; nothing changed" in again.stderr


def test_a_diff_can_be_shown_instead():
    done = convert(SCRIPT, "--diff")
    assert done.stdout.startswith("--- ") and "+    hvd.init()" in done.stdout


def test_what_is_to_be_decided_is_listed_with_lines():
    done = convert(str(SERIAL / "tf2_variables.py"))
    assert done.returncode == 0
    assert "To decide:\n  " in done.stderr


def test_what_the_check_warns_of_is_to_be_decided(tmp_path):
    script = tmp_path / "train.py"
    text = (SERIAL / "torch_flat.py").read_text()
    step = "loss.backward()"
    script.write_text(text.replace(step, f"if loss.isnan():\n            continue\n        {step}"))
    made = convert(str(script))
    listed = made.stderr.partition("To decide:\n")[2]
    assert "loss.isnan() differs between ranks, so some skip a step" in listed
    lines = made.stdout.splitlines()
    number = int(re.search(r":(\d+): loss.isnan", listed)[1])
    assert lines[number - 1].strip() == "if loss.isnan():"
    marked = next(line for line in reversed(lines[: number - 1]) if "qsgd-hpc" in line)
    assert marked.startswith("        # qsgd-hpc: TODO loss.isnan() differs between ranks, so some")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print(1)\n", "Looked for imports of torch"),
        ("import torch\nx = torch.ones(1)\n", "looked for a call of backward()"),
        ("import torch\nx = (\n", "not valid Python"),
        (
            "import lightning\nimport torch\n",
            "distributed by lightning, with Trainer(strategy=...): start it by qsgd-hpc run -np 2",
        ),
        ("import accelerate\nimport torch\n", "distributed by accelerate: start it by"),
        ("import deepspeed\nimport torch\n", "distributed by DeepSpeed, whose engine"),
        (
            "from transformers import Trainer\nTrainer(m).train()\n",
            "by transformers.Trainer(): start",
        ),
        (
            "from torch.distributed.fsdp import fully_shard\nfully_shard(m)\n",
            "distributed by torch.distributed.fsdp.fully_shard(): start it by",
        ),
        (
            "import torch\ntorch.distributed.init_process_group('nccl')\n",
            "distributed by torch.distributed.init_process_group(): start it by qsgd-hpc run -np 2",
        ),
        ("import torch, jax\nloss.backward()\n", "choose by --framework"),
    ],
)
def test_what_cannot_be_converted_is_refused_in_one_line(tmp_path, text, words):
    script = tmp_path / "train.py"
    script.write_text(text)
    done = convert(str(script))
    assert done.returncode == 2
    assert words in done.stderr and str(script) in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_a_script_that_is_not_there_is_refused_in_one_line(tmp_path):
    done = convert(str(tmp_path / "none.py"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_the_steps_are_eight():
    assert [each.number for each in STEPS] == list(range(1, 9))
    assert step(5).name == "wrap the optimizer"
