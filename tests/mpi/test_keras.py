"""Keras on real ranks, on each of its backends."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.one_mpi,
    pytest.mark.skipif(find_spec("keras") is None, reason="needs Keras"),
]
LESSON = str(Path(__file__).parents[2] / "tutorials" / "mnist_keras" / "train_mnist_keras.py")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("tensorflow", 2),
        ("tensorflow", 3),
        ("tensorflow", 4),
        ("torch", 2),
        ("jax", 2),
    ],
)
def test_what_keras_promises_holds_on_real_ranks(run_suite, backend, ranks):
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    run_suite(ranks, "tests/keras", KERAS_BACKEND=backend)


@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_it_holds_on_pytorch_without_its_compiler(run_suite):
    """``torch.compile`` takes longer than all other tests together."""
    run_suite(2, "tests/keras", "-k", "not torch_compiles", KERAS_BACKEND="torch")


def _accuracy(run_ranks, ranks, data, *arguments, **environ):
    done = run_ranks(ranks, LESSON, *arguments, timeout_s=1500, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{data}: "), done.stdout
    return float(re.findall(r"Test accuracy: ([\d.]+)", done.stdout)[-1])


def test_the_lesson_learns_and_saves_what_it_has_learnt(run_ranks, tmp_path):
    file = tmp_path / "model.keras"
    arguments = ["--digits", "--epochs", "12", "--checkpoint", str(file)]
    assert _accuracy(run_ranks, 2, "digits", *arguments) > 0.9
    assert file.is_file()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_lesson_reaches_98_5_percent_on_mnist(run_ranks, ranks):
    folder = Path(os.environ.get("QSGD_DATA", "/nowhere"))
    if not (folder / "mnist" / "train-images-idx3-ubyte.gz").is_file():
        pytest.skip("needs the 60,000 MNIST images: point QSGD_DATA at the folder of mnist/")
    four = ("--epochs", "4")
    assert _accuracy(run_ranks, ranks, "mnist", *four, QSGD_DATA=str(folder)) >= 0.985
