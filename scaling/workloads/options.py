"""The command line that all workloads share, and how fast they learn with a larger batch."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

ALGORITHMS = "name of an allreduce (default $QSGD_ALGORITHM)"


def positive(text: str) -> int:
    """Return the number that the text spells, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least 1")
    return int(text)


def parser(what: str, *, epochs: int | None, batch: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every workload.

    Args:
        what: the first line of --help.
        epochs: default of --epochs; None where the caller finds one.
        batch: default of --batch-size.
    """
    options = argparse.ArgumentParser(description=what)
    size = options.add_mutually_exclusive_group()
    size.add_argument(
        "--batch-size", type=positive, metavar="B", help=f"samples a step, each rank ({batch})"
    )
    size.add_argument(
        "--global-batch-size", type=positive, metavar="B", help="the same, all ranks together"
    )
    options.add_argument(
        "--epochs", type=positive, default=epochs, help=f"passes ({epochs or 'as published'})"
    )
    options.add_argument("--steps", type=positive, help="stop after so many altogether")
    options.add_argument(
        "--data", type=Path, metavar="DIR", help="default $QSGD_DATA; without it images are digits"
    )
    options.add_argument("--synthetic", action="store_true", help="made-up data, no files")
    options.add_argument("--seed", type=int, default=1, help="of weights and order (1)")
    options.add_argument("--bits", type=int, choices=(*range(1, 9), 32), help="default $QSGD_BITS")
    options.add_argument("--algorithm", help=ALGORITHMS)
    options.add_argument("--no-eval", action="store_true", help="do not test after each epoch")
    options.set_defaults(default_batch=batch)
    return options


def for_images(what: str, *, epochs: int, batch: int) -> argparse.ArgumentParser:
    """Return the parser of a network that labels images of any size."""
    options = parser(what, epochs=epochs, batch=batch)
    options.add_argument("--images", type=positive, help="to train on (all)")
    options.add_argument("--classes", type=positive, help="outputs (those of the data; 1000)")
    options.add_argument(
        "--image-size", type=positive, help="pixels a side (cifar10, digits 32; else 224)"
    )
    return options


def apply_algorithm(args: argparse.Namespace) -> None:
    """Let the engine use --algorithm; call it before ``hvd.init()``, which reads the variable."""
    if args.algorithm:
        os.environ["QSGD_ALGORITHM"] = args.algorithm


def data_folder(args: argparse.Namespace) -> Path | None:
    """Return --data, else QSGD_DATA, else nothing."""
    folder = args.data or os.environ.get("QSGD_DATA")
    return Path(folder).expanduser() if folder else None


def global_batch(args: argparse.Namespace, ranks: int) -> int:
    """Return how many samples all ranks together take in a step."""
    return int(args.global_batch_size or (args.batch_size or args.default_batch) * ranks)


def total_steps(args: argparse.Namespace, steps_per_epoch: int) -> int:
    """Return how many steps the training has."""
    whole = int(args.epochs) * steps_per_epoch
    return min(whole, int(args.steps)) if args.steps else whole


def learning_rate(step: int, steps: int, peak: float, warm_up: float = 0.1) -> float:
    """Rise linearly to `peak` over the warm-up, a share of all steps; then fall to nothing."""
    rising = int(warm_up * steps)
    return peak * min((step + 1) / (rising + 1), (steps - step) / (steps - rising))
