"""Train a small convolutional network on MNIST, in one process.

    python train_mnist.py --data DIR     # 99.2% after 3 epochs, half a minute each on one core

DIR holds the four MNIST files, plain or .gz; without --data the folder that QSGD_DATA names is
used, or the files are downloaded. Where there are none and no network either, scikit-learn's 1,797
digits stand in (93% after 12 epochs), and the script says so.

train_mnist_hvd.py is this script for many ranks: compare the two with `diff`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import mnist_data
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def build_model() -> nn.Sequential:
    """Two convolutions and two linear layers, 207,018 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Fall linearly from `peak` to nothing over `steps`."""
    return peak * (1 - step / steps)


@torch.no_grad()
def count_correct(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Return how many images the model labels rightly."""
    model.eval()
    pairs = zip(images.split(1000), labels.split(1000), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Write a checkpoint in one step: a job that is killed leaves the old file or the new one."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    partial = path.with_name(f".{path.name}.partial")
    torch.save(state, partial)
    partial.replace(path)


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int | str:
    """Return how many epochs the checkpoint has behind it, or why it cannot be used."""
    if not path.exists():
        print(f"{path}: no checkpoint there yet, starting from the beginning")
        return 0
    try:
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["epoch"])
    except Exception as error:  # torch raises many kinds; each means the same to the user
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"{path}: not a checkpoint of this network ({reason}). Choose another file."


def train(args: argparse.Namespace) -> None:
    """Train, printing one line for each."""
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    folder = mnist_data.data_dir(args.data)
    data = mnist_data.load(folder if not args.digits and mnist_data.prepare(folder) else None)
    x_train, y_train = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    x_test, y_test = torch.from_numpy(data.test_images), torch.from_numpy(data.test_labels)
    x_train, y_train = x_train.to(device), y_train.to(device)
    x_test, y_test = x_test.to(device), y_test.to(device)
    batch_size = args.batch_size
    steps_per_epoch = math.ceil(len(x_train) / batch_size)
    epochs = args.epochs or (3 if data.name == "mnist" else 12)
    steps = epochs * steps_per_epoch
    peak = args.lr
    print(
        f"{data.name}: {len(x_train)} training images, {len(x_test)} for testing; "
        f"batch {batch_size}, learning rate {peak:g}"
    )

    model = build_model().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=peak, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    first_epoch = restore(args.checkpoint, model, optimizer) if args.resume else 0
    if isinstance(first_epoch, str):
        sys.exit(f"train_mnist: {first_epoch}")

    for epoch in range(first_epoch, epochs):
        model.train()
        begin = time.perf_counter()
        loss_sum = torch.zeros((), device=device)
        order = torch.randperm(
            len(x_train), generator=torch.Generator().manual_seed(args.seed + epoch)
        )
        for step, batch in enumerate(order.split(batch_size), start=epoch * steps_per_epoch):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, peak)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x_train[batch]), y_train[batch])
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(batch)
        train_loss = loss_sum.item() / len(x_train)
        seconds = time.perf_counter() - begin
        accuracy = count_correct(model, x_test, y_test) / len(x_test)
        print(
            f"epoch {epoch + 1}/{epochs}  loss {train_loss:.4f}  "
            f"test accuracy {accuracy:.2%}  {seconds:.1f} s  {len(x_train) / seconds:.0f} images/s",
            flush=True,
        )
        if args.checkpoint:
            save(args.checkpoint, model, optimizer, epoch + 1)


def positive(text: str) -> int:
    """Return the number that the text spells, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least 1")
    return int(text)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small network on MNIST.")
    parser.add_argument(
        "--epochs", type=positive, help="passes over the images (default 3; digits 12)"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=64, help="images a step (default 64)"
    )
    parser.add_argument("--lr", type=float, default=0.03, help="first learning rate (default 0.03)")
    parser.add_argument("--data", metavar="DIR", help="folder of MNIST (default $QSGD_DATA)")
    parser.add_argument("--digits", action="store_true", help="scikit-learn's digits, not MNIST")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="saved after each epoch")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--seed", type=int, default=1, help="of weights and order (default 1)")
    args = parser.parse_args()
    if not args.lr > 0:
        parser.error(f"--lr {args.lr:g}: expected a positive number")
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint FILE, the file to go on from")
    return args


if __name__ == "__main__":
    try:
        train(parse_args())
    except mnist_data.DataError as error:
        sys.exit(f"train_mnist: {error}")
