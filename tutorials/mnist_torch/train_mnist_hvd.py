"""Train a small convolutional network on MNIST, on many ranks.

    qsgd-hpc run -np 2 train_mnist_hvd.py --data DIR             # 99.2% after 3 epochs
    qsgd-hpc run -np 2 --bits 4 train_mnist_hvd.py --data DIR    # 99.1%, 7.7 times fewer bytes

This is train_mnist.py and eight steps, each marked where it happens. A global batch is made of the
same images whatever the number of ranks, and its gradient is their mean exactly.

Records (where QSGD_RECORDS names a file): one "epoch" after each epoch, one "final". The final
images/s leaves out the first ten steps, or half of them in a shorter run, and all evaluation.
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

import qsgd_hpc.torch as hvd
from qsgd_hpc.scaling import record

REFERENCE_BATCH = 64  # that --lr is meant for
MAX_SCALE = 8  # 8 x 0.03; measured: a peak of 0.4 cost 9 points, one of 0.8 ended in NaN
WARM_UP = 0.1  # of all steps
UNTIMED_STEPS = 10


def build_model() -> nn.Sequential:
    """Two convolutions and two linear layers, 207,018 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rise linearly to `peak` over the warm-up, then fall linearly to nothing over `steps`."""
    warm_up = int(WARM_UP * steps)
    return peak * min((step + 1) / (warm_up + 1), (steps - step) / (steps - warm_up))


@torch.no_grad()
def count_correct(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Return how many images the model labels rightly."""
    model.eval()
    pairs = zip(images.split(1000), labels.split(1000), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs)


def total(*values: float) -> list[float]:
    """Return each value summed over the ranks, exact for integers up to 2^53."""
    sums: list[float] = hvd.allreduce(
        torch.tensor(values, dtype=torch.float64), op=hvd.Sum
    ).tolist()
    return sums


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


def load_data(args: argparse.Namespace) -> mnist_data.DataSet:
    """Return the data set, the same on every rank."""
    folder = mnist_data.data_dir(args.data)
    # One rank per node looks for the files and may download them. The others wait in the allreduce,
    # and if a single node has none, all ranks take the digits.
    ready = not args.digits and (hvd.local_rank() != 0 or mnist_data.prepare(folder))
    ready_everywhere = hvd.allreduce(torch.tensor(int(ready)), op=hvd.Min).item() == 1
    return mnist_data.load(folder if ready_everywhere else None)


def train(args: argparse.Namespace) -> None:
    """Train; rank 0 prints one line for each."""
    # Step 1: init. From here on every rank knows its number and how many there are.
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    torch.manual_seed(args.seed)

    # Step 2: pin the GPU. The ranks of a node each take their own.
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)

    data = load_data(args)
    x_train, y_train = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    x_test, y_test = torch.from_numpy(data.test_images), torch.from_numpy(data.test_labels)
    x_train, y_train = x_train.to(device), y_train.to(device)
    # Step 3: shard the data. Rank r tests on images r, r + ranks, r + 2 ranks, ...
    x_test, y_test = x_test[rank::ranks].to(device), y_test[rank::ranks].to(device)
    batch_size = args.global_batch_size or args.batch_size * ranks
    steps_per_epoch = math.ceil(len(x_train) / batch_size)
    epochs = args.epochs or (3 if data.name == "mnist" else 12)
    steps = epochs * steps_per_epoch
    # Step 4: scale the learning rate. A batch k times larger takes k times larger steps, after a
    # warm-up (see learning_rate) during which the weights are still far from where they will be.
    peak = args.lr * min(batch_size / REFERENCE_BATCH, MAX_SCALE)
    if rank == 0:
        print(
            f"{data.name}: {len(x_train)} training images, {len(data.test_images)} for testing; "
            f"batch {batch_size} on {ranks} rank(s), learning rate {peak:g}"
        )

    model = build_model().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=peak, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    # Step 5: distribute the optimizer. Its step() uses the mean of all ranks' gradients, quantised
    # on the way if asked for: by --bits here, or else by QSGD_BITS (qsgd-hpc run --bits 4).
    compression = None
    if args.bits:
        compression = hvd.Compression.none if args.bits == 32 else hvd.Compression.qsgd(args.bits)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )

    first_epoch = restore(args.checkpoint, model, optimizer) if args.resume and rank == 0 else 0
    # Step 6: broadcast parameters and optimizer state, so that every rank starts where rank 0 does.
    first_epoch = hvd.broadcast_object(first_epoch, root_rank=0)
    if isinstance(first_epoch, str):
        sys.exit(f"train_mnist_hvd: {first_epoch}" if rank == 0 else 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    steps_done, timed_images, timed_s, trained_s, accuracy = 0, 0, 0.0, 0.0, math.nan
    untimed = min(UNTIMED_STEPS, (epochs - first_epoch) * steps_per_epoch // 2)
    for epoch in range(first_epoch, epochs):
        model.train()
        begin = time.perf_counter()
        loss_sum = torch.zeros((), device=device)
        order = torch.randperm(
            len(x_train), generator=torch.Generator().manual_seed(args.seed + epoch)
        )
        for step, batch in enumerate(order.split(batch_size), start=epoch * steps_per_epoch):
            step_begin = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, peak)
            optimizer.zero_grad()
            # Step 3 again: all ranks draw the same order, and each takes every ranks-th image of
            # the batch. Shards differ by one image at most, so the loss is divided by the fair
            # share of a rank, not by its own count: the mean over ranks is then the batch's mean.
            shard = batch[rank::ranks]
            loss = F.cross_entropy(model(x_train[shard]), y_train[shard], reduction="sum")
            (loss / (len(batch) / ranks)).backward()
            optimizer.step()
            loss_sum += loss.detach()
            steps_done += 1
            if steps_done > untimed:
                timed_images += len(batch)
                timed_s += time.perf_counter() - step_begin
        # Step 8: average the metrics. Sums and counts are added up, so the result is exact.
        (loss_total,) = total(loss_sum.item())
        seconds = time.perf_counter() - begin
        trained_s += seconds
        correct, count = total(count_correct(model, x_test, y_test), len(x_test))
        train_loss, accuracy = loss_total / len(x_train), correct / count
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{epochs}  loss {train_loss:.4f}  "
                f"test accuracy {accuracy:.2%}  {seconds:.1f} s  "
                f"{len(x_train) / seconds:.0f} images/s",
                flush=True,
            )
            record(
                "epoch",
                epoch=epoch + 1,
                images=len(x_train),
                seconds=seconds,
                elapsed_s=trained_s,
                images_per_s=len(x_train) / seconds,
                train_loss=train_loss,
                test_accuracy=accuracy,
            )
            # Step 7: checkpoint on rank 0 only; all ranks hold the same weights.
            if args.checkpoint:
                save(args.checkpoint, model, optimizer, epoch + 1)

    stats = hvd.communication_stats()
    wire_bytes, gradient_bytes, comm_time_s = total(
        stats["wire_bytes"], stats["gradient_bytes"], stats["comm_time_s"] / ranks
    )
    if rank == 0 and steps_done:
        print(
            f"sent {wire_bytes / ranks / 1e6:.1f} MB per rank in {steps_done} steps; "
            f"{comm_time_s:.1f} s of communication; {timed_images / timed_s:.0f} images/s"
        )
        record(
            "final",
            ranks=ranks,
            images_per_s=timed_images / timed_s,
            test_accuracy=accuracy,
            test_samples=len(data.test_images),
            wire_bytes=int(wire_bytes),
            gradient_bytes=int(gradient_bytes),
            comm_time_s=comm_time_s,
            steps=steps_done,
            global_batch_size=batch_size,
            dataset=data.name,
        )
    elif rank == 0:
        print(f"{args.checkpoint} has {first_epoch} epochs behind it: raise --epochs to go on")


def positive(text: str) -> int:
    """Return the number that the text spells, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least 1")
    return int(text)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small network on MNIST, on many ranks.")
    parser.add_argument(
        "--epochs", type=positive, help="passes over the images (default 3; digits 12)"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=64, help="images a rank (default 64)"
    )
    parser.add_argument(
        "--global-batch-size", type=positive, help="images a step, all ranks together"
    )
    parser.add_argument("--lr", type=float, default=0.03, help="for a batch of 64 (default 0.03)")
    parser.add_argument("--bits", type=int, choices=(*range(1, 9), 32), help="default $QSGD_BITS")
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
    except (mnist_data.DataError, hvd.UsageError, hvd.NonFiniteGradientError) as error:
        sys.exit(f"train_mnist_hvd: {error}" if hvd.local_rank() == 0 else 1)
