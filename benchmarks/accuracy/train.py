"""Train one network with every code, and print the accuracy and the bytes sent of each.

    qsgd-hpc run -np 2 benchmarks/accuracy/train.py --task mnist --data data/mnist
    qsgd-hpc run -np 2 benchmarks/accuracy/train.py --task resnet34 --data data/cifar10 \
        --width 8 --images 8000 --only 'qsgd*'
    qsgd-hpc run -np 2 benchmarks/accuracy/train.py --device cuda    # ranks share the GPUs

All start with the same weights and use the same batches. With --json the record is written after
each training; a run that finds a record resumes it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
from codes import ALL, select
from measure import train
from report import lines, title
from tables import show
from tasks import BUILDERS, Task

import qsgd_hpc
import qsgd_hpc.torch as hvd

SCHEMA = 1
ORDER = [contestant.name for contestant in ALL]


def describe(task: Task, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Return the record without rows: all settings that must be equal for comparable rows."""
    return {
        "schema": SCHEMA,
        "version": qsgd_hpc.__version__,
        "date": datetime.date.today().isoformat(),
        "mpi": hvd.mpi_library_version().partition("\n")[0].strip("\0"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ranks": hvd.size(),
        "task": task.title,
        "parameters": sum(p.numel() for p in task.build().parameters()),
        "images": len(task.images.x_train),
        "test_images": len(task.images.x_test),
        "batch": task.batch,
        "epochs": args.epochs,
        "seed": args.seed,
        "rows": [],
    }


def resume(record: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """Return the record with the rows of an earlier run.

    Raises:
        UsageError: the earlier run had other settings.
    """
    if path is None or not path.exists():
        return record
    found = json.loads(path.read_text())
    for key in record.keys() - {"date", "rows"}:
        if found.get(key) != record[key]:
            raise hvd.UsageError(
                f"{path} is of a run with {key} {found.get(key)!r}, this is one with "
                f"{record[key]!r}: give another --json, or remove the file to start again"
            )
    return {**record, "rows": found["rows"]}


def save(record: dict[str, Any], path: Path | None) -> None:
    """Write the record, with its rows in the table's order, and print the latest result."""
    row = record["rows"][-1]
    print(f"{row['what']}: {row['test_accuracy']:.2%}", file=sys.stderr, flush=True)
    record["rows"].sort(key=lambda row: ORDER.index(row["what"]))
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=tuple(BUILDERS), default="mnist")
    parser.add_argument("--data", type=Path, help="MNIST or CIFAR-10; default: noise")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default cpu)")
    parser.add_argument("--epochs", type=int, default=3, help="(default 3)")
    parser.add_argument("--images", type=int, help="number of training images (default all)")
    parser.add_argument("--width", type=int, default=16, help="of ResNet-34; 64 in the paper")
    parser.add_argument("--seed", type=int, default=1, help="of weights and order (default 1)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN",
        help="train only names such as 'qsgd*' or '*feedback'; repeatable",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record, too")
    return parser.parse_args()


def main() -> None:
    """Do all selected trainings that are not in the record; rank 0 prints the table."""
    args = parse_args()
    torch.set_num_threads(1)
    hvd.init()
    task = BUILDERS[args.task](args.data, images=args.images, width=args.width)
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    begun = describe(task, device, args)
    record = hvd.broadcast_object(resume(begun, args.json) if hvd.rank() == 0 else None)
    done = {row["what"] for row in record["rows"]}
    for contestant in select(args.only):
        if contestant.name not in done:
            row = train(contestant, task, device, epochs=args.epochs, seed=args.seed)
            record["rows"].append(row)
            if hvd.rank() == 0:
                save(record, args.json)
    if hvd.rank() == 0:
        show(title(record), lines(record))


if __name__ == "__main__":
    main()
