"""The language model: more ranks learn the same, and what is resumed is the same to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.one_mpi
LESSON = Path(__file__).parents[2] / "tutorials" / "language_model"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """Write a text of 40 different words, in which each hints at the next."""
    folder, random = tmp_path / "tiny", np.random.default_rng(1)
    folder.mkdir()
    for part, lines in (("train", 170), ("valid", 85), ("test", 85)):
        begins = random.integers(0, 40, lines)
        text = "\n".join(" ".join(f"w{(b + i * i) % 40}" for i in range(9)) for b in begins)
        (folder / f"ptb.{part}.txt").write_text(text + "\n")
    return str(folder)


def _train(run_ranks: Run, records: Path, ranks: int, *command: str) -> list[dict[str, Any]]:
    """Run a script to its end and return its records."""
    ended = run_ranks(ranks, *command, "--records", str(records), **ONE_THREAD)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return _records(records)


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _perplexities(records: list[dict[str, Any]]) -> list[float]:
    return [v for r in records for k, v in r.items() if k.endswith("perplexity")]


@pytest.fixture
def shrunk(tmp_path: Path) -> Callable[..., str]:
    """Return shrunk(script, dropout): a script that runs it with a small network and window.

    Where STOP is set, its job's time runs out at the tenth step.
    """

    def write(script: str, dropout: float = 0.0) -> str:
        path = tmp_path / f"shrunk_{script}"
        path.write_text(
            "import dataclasses, os, runpy, sys\n"
            f"sys.path.insert(0, {str(LESSON)!r})\n"
            "import configs, qsgd_hpc\n"
            f"less = dict(hidden=40, num_steps=5, dropout={dropout})\n"
            "configs.CONFIGS['small'] = dataclasses.replace(configs.CONFIGS['small'], **less)\n"
            "if 'STOP' in os.environ:\n"
            "    qsgd_hpc.should_stop = lambda: True\n"
            "    qsgd_hpc.exit_for_resubmit = lambda: sys.exit(0)\n"
            f"runpy.run_path({str(LESSON / script)!r}, run_name='__main__')\n"
        )
        return str(path)

    return write


@pytest.mark.parametrize(
    ("framework", "serial", "widths"),
    [("torch", "train_lm", {"8": 0.01, "4": 0.05}), ("tensorflow", "train_lm_tf", {"4": 0.05})],
)
def test_ranks_change_nothing_and_bits_little(
    run_ranks: Run,
    tmp_path: Path,
    tiny: str,
    shrunk: Callable[..., str],
    framework: str,
    serial: str,
    widths: dict[str, float],
) -> None:
    pytest.importorskip(framework)
    options = ["--data", tiny, "--epochs", "1"]
    command = [sys.executable, shrunk(f"{serial}.py"), *options, "--records", str(tmp_path / "1")]
    subprocess.run(command, check=True, env={**os.environ, **ONE_THREAD})
    one = _perplexities(_records(tmp_path / "1"))
    script = shrunk(f"{serial}_hvd.py")
    two = _perplexities(_train(run_ranks, tmp_path / "2", 2, script, *options))
    assert len(one) == 3 and two == pytest.approx(one, rel=1e-4)
    for bits, bound in widths.items():
        records = _train(run_ranks, tmp_path / bits, 2, "--bits", bits, script, *options)
        assert records[0]["bits"] == int(bits)
        coded = _perplexities(records)
        assert coded != two and coded == pytest.approx(one, rel=bound)


@pytest.mark.parametrize(
    ("framework", "script"), [("torch", "train_lm_hvd.py"), ("tensorflow", "train_lm_tf_hvd.py")]
)
def test_a_chain_of_jobs_in_4_bits_with_dropout_ends_as_one_job_does(
    run_ranks: Run,
    tmp_path: Path,
    tiny: str,
    shrunk: Callable[..., str],
    framework: str,
    script: str,
) -> None:
    pytest.importorskip(framework)
    options = ["--bits", "4", shrunk(script, 0.5), "--data", tiny]
    whole = _train(run_ranks, tmp_path / "whole", 2, *options, "--epochs", "2")
    options += ["--checkpoint", str(tmp_path / "c"), "--resume", "--epochs"]
    _train(run_ranks, tmp_path / "parts", 2, *options, "1")
    if framework == "torch":  # stops between two steps as well
        stopped = run_ranks(2, *options, "2", STOP="1", **ONE_THREAD)
        assert stopped.returncode == 0 and "epoch 2" not in stopped.stdout, stopped.stderr
    parts = _train(run_ranks, tmp_path / "parts", 2, *options, "2")
    del parts[1]  # the test after the first epoch
    assert _perplexities(parts) == _perplexities(whole)
    assert not list(tmp_path.glob(".c*"))


@pytest.mark.gate
def test_where_there_is_no_text_one_line_says_where_to_get_it(
    run_ranks: Run, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    ended = run_ranks(2, str(LESSON / "train_lm_hvd.py"), "--data", str(tmp_path))
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert ended.stderr.count("simple-examples.tgz of Mikolov") == 1


@pytest.mark.gate
def test_the_lessons_table_is_that_of_the_recorded_runs() -> None:
    printed = subprocess.run(
        [sys.executable, str(LESSON / "table.py")], check=True, capture_output=True, text=True
    ).stdout
    assert printed in (LESSON / "README.md").read_text(encoding="utf-8")
