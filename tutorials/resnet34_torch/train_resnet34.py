"""Train ResNet-34 on small images, on many ranks.

    qsgd-hpc submit --nodes 8 train_resnet34.py                  # as a job, one rank per node
    qsgd-hpc run -np 2 --bits 4 train_resnet34.py --data DIR     # here, in the foreground

As it stands this fits a laptop: without a GPU it trains a network a quarter as wide on 2,000 images
for 3 epochs, on 8 ranks and two cores in about two minutes. With a GPU it is the network of the
paper and all images. DIR holds CIFAR-10 (see cifar_data.py); without it, scikit-learn's digits
stand in.

The eight steps are those of ../mnist_torch. Records (where QSGD_RECORDS names a file): one "epoch"
after each epoch, one "final", whose images/s leaves out the first ten steps, or half of them in a
shorter run, and all evaluation.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import cifar_data
import torch
import torch.nn.functional as F
from resnet import resnet34
from torch import Tensor, nn

import qsgd_hpc.torch as hvd
from qsgd_hpc.scaling import record

REFERENCE_BATCH = 128  # that --lr is meant for
WARM_UP = 0.2  # of all steps
UNTIMED_STEPS = 10


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rise linearly to `peak` over the warm-up, then fall linearly to nothing over `steps`."""
    warm_up = int(WARM_UP * steps)
    return peak * min((step + 1) / (warm_up + 1), (steps - step) / (steps - warm_up))


def normalise(images: Tensor) -> Tensor:
    """Turn bytes, shape (n, 3, 32, 32), into floats around zero."""
    return images.float() / 127.5 - 1


def augment(images: Tensor) -> Tensor:
    """Move the whole batch by up to four pixels, so that no image is seen twice alike."""
    down, right = torch.randint(0, 9, (2,)).tolist()
    return F.pad(images, (4, 4, 4, 4))[:, :, down : down + 32, right : right + 32]


@torch.no_grad()
def count_correct(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """Return how many images the model labels rightly."""
    model.eval()
    pairs = zip(images.split(250), labels.split(250), strict=True)
    return sum(int((model(normalise(x)).argmax(1) == y).sum()) for x, y in pairs)


def total(*values: float) -> list[float]:
    """Return each value summed over the ranks, exact for integers up to 2^53."""
    sums: list[float] = hvd.allreduce(
        torch.tensor(values, dtype=torch.float64), op=hvd.Sum
    ).tolist()
    return sums


def average_buffers(model: nn.Module) -> None:
    """Give every rank the mean of the batch-norm statistics, which no gradient keeps equal."""
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            hvd.allreduce_(buffer, name=f"buffer.{name}")


def load_data(args: argparse.Namespace) -> cifar_data.DataSet:
    """Read the images on rank 0 and give them to all.

    Every rank opening the same small files is what brings a parallel file system down.
    """
    loaded: cifar_data.DataSet | str | None = None
    if hvd.rank() == 0:
        folder = cifar_data.data_dir(args.data)
        source = cifar_data.find(folder)
        if source is None:
            print(
                f"no CIFAR-10 in {folder or '--data or QSGD_DATA'}: scikit-learn's digits instead"
            )
        try:
            loaded = cifar_data.load(source, args.images)
        except cifar_data.DataError as error:
            loaded = str(error)
    loaded = hvd.broadcast_object(loaded, root_rank=0)
    if not isinstance(loaded, cifar_data.DataSet):
        sys.exit(f"train_resnet34: {loaded}" if hvd.rank() == 0 else 1)
    return loaded


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
    """Train; rank 0 prints one line for each epoch."""
    # Step 1: init.
    hvd.init()
    rank, ranks = hvd.rank(), hvd.size()
    torch.manual_seed(args.seed + rank)  # ranks shift their images differently

    # Step 2: pin the GPU.
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    width = args.width or (64 if device.type == "cuda" else 16)
    args.images = args.images or (50_000 if device.type == "cuda" else 2_000)

    data = load_data(args)
    x_train = torch.from_numpy(data.train_images).to(device)
    y_train = torch.from_numpy(data.train_labels).to(device)
    # Step 3: shard the data, here for testing.
    x_test = torch.from_numpy(data.test_images)[rank::ranks].to(device)
    y_test = torch.from_numpy(data.test_labels)[rank::ranks].to(device)
    batch_size = args.global_batch_size or args.batch_size * ranks
    # A last batch that is not full is left out: batch norm needs images on every rank.
    steps_per_epoch = len(x_train) // batch_size
    if batch_size < ranks or steps_per_epoch == 0:
        raise hvd.UsageError(
            f"a batch of {batch_size} over {ranks} rank(s) does not fit {len(x_train)} images: "
            f"choose --global-batch-size between {ranks} and {len(x_train)}, or more --images"
        )
    steps = args.epochs * steps_per_epoch
    # Step 4: scale the learning rate, with a warm-up.
    peak = args.lr * batch_size / REFERENCE_BATCH
    if rank == 0:
        print(
            f"{data.name}: {len(x_train)} training images, {len(data.test_images)} for testing; "
            f"width {width}, batch {batch_size} on {ranks} rank(s), learning rate {peak:g}",
            flush=True,
        )

    model = resnet34(width).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=peak, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    # Step 5: distribute the optimizer.
    compression = None
    if args.bits:
        compression = hvd.Compression.none if args.bits == 32 else hvd.Compression.qsgd(args.bits)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )

    first_epoch = restore(args.checkpoint, model, optimizer) if args.resume and rank == 0 else 0
    # Step 6: broadcast parameters and optimizer state.
    first_epoch = hvd.broadcast_object(first_epoch, root_rank=0)
    if isinstance(first_epoch, str):
        sys.exit(f"train_resnet34: {first_epoch}" if rank == 0 else 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    steps_done, timed_images, timed_s, accuracy = 0, 0, 0.0, 0.0
    untimed = min(UNTIMED_STEPS, (args.epochs - first_epoch) * steps_per_epoch // 2)
    for epoch in range(first_epoch, args.epochs):
        model.train()
        begin = time.perf_counter()
        loss_sum = torch.zeros((), device=device)
        order = torch.randperm(
            len(x_train), generator=torch.Generator().manual_seed(args.seed + epoch)
        )[: steps_per_epoch * batch_size]
        for step, batch in enumerate(order.split(batch_size), start=epoch * steps_per_epoch):
            step_begin = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, peak)
            optimizer.zero_grad()
            # Step 3 again: each rank takes every ranks-th image of the batch; dividing by the fair
            # share of a rank makes the mean over ranks the mean over the batch.
            shard = batch[rank::ranks]
            images = augment(normalise(x_train[shard]))
            loss = F.cross_entropy(model(images), y_train[shard], reduction="sum")
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
        average_buffers(model)
        correct, count = total(count_correct(model, x_test, y_test), len(x_test))
        images_seen = steps_per_epoch * batch_size
        train_loss, accuracy = loss_total / images_seen, correct / count
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs}  loss {train_loss:.4f}  "
                f"test accuracy {accuracy:.1%}  {seconds:.1f} s  "
                f"{images_seen / seconds:.0f} images/s",
                flush=True,
            )
            record(
                "epoch",
                epoch=epoch + 1,
                images=images_seen,
                seconds=seconds,
                images_per_s=images_seen / seconds,
                train_loss=train_loss,
                test_accuracy=accuracy,
            )
            # Step 7: checkpoint on rank 0 only.
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
    parser = argparse.ArgumentParser(description="Train ResNet-34 on small images, on many ranks.")
    parser.add_argument("--epochs", type=positive, default=3, help="passes (default 3)")
    parser.add_argument("--batch-size", type=positive, default=16, help="images a rank (16)")
    parser.add_argument(
        "--global-batch-size", type=positive, help="images a step, all ranks together"
    )
    parser.add_argument("--images", type=positive, help="to train on (CPU 2000, GPU all)")
    parser.add_argument("--width", type=positive, help="of the first stage (CPU 16, GPU 64)")
    parser.add_argument("--lr", type=float, default=0.05, help="for a batch of 128 (0.05)")
    parser.add_argument("--bits", type=int, choices=(*range(1, 9), 32), help="default $QSGD_BITS")
    parser.add_argument("--data", metavar="DIR", help="folder of CIFAR-10 (default $QSGD_DATA)")
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
    except (hvd.UsageError, hvd.NonFiniteGradientError) as error:
        sys.exit(f"train_resnet34: {error}" if hvd.local_rank() == 0 else 1)
