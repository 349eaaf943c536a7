"""Measure the error of a mean of real gradients by code and bits, on 2 to 64 ranks.

    python benchmarks/accuracy/bits.py --data data --json bits.json --png bits.png
    python benchmarks/accuracy/bits.py --markdown bits.json

Three networks are trained for some steps; then each rank computes the gradient of its own batch.
The ranks are threads of this process, and this package's codes use the same reduction as in jobs.
Other codes are computed from their definitions and reduced in the same way: each rank's share is
coded, and their sum is coded again. Only matrices of at least 1024 elements count; others are sent
uncoded.

fp8 is E4M3 with a scale for every 512 elements. MX formats have a power of two for every 32: E2M1,
E3M2 and E4M3 (Open Compute Project, Microscaling Formats 1.0, 2023). PowerSGD (Vogels et al.,
NeurIPS 2019) is used without error feedback, with the factors of its second iteration.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from reductions import nmse, sum_error
from tables import markdown, show
from tasks import BUILDERS

sys.path.append(str(Path(__file__).resolve().parent.parent / "fsdp"))

from model import Text, Transformer

import qsgd_hpc
import qsgd_hpc.torch as hvd
from qsgd_hpc import _core

SCHEMA = 1
RANKS = (2, 4, 8, 16, 32, 64)
LEAST = 1024  # least elements of a matrix that is coded
STEPS = 30  # of training before gradients are recorded
CONTEXT = 64
BUCKET = 512
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Gradients:
    """The coded matrices of each rank, one after the other, and their shapes."""

    of: str
    shares: list[Floats]
    shapes: list[tuple[int, int]]


def record(
    name: str, model: torch.nn.Module, batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
) -> Gradients:
    """Train a network, and return the gradients of one batch for each of the most ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def back(number: int) -> None:
        x, y = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()

    for step in range(STEPS):
        back(step)
        optimizer.step()
    shares, shapes = [], []
    for rank in range(max(RANKS)):
        back(STEPS + rank)
        coded = [p.grad for p in model.parameters() if p.ndim > 1 and p.numel() >= LEAST]
        matrices = [gradient.flatten(1) for gradient in coded if gradient is not None]
        shapes = [(m.shape[0], m.shape[1]) for m in matrices]
        shares.append(torch.cat([m.flatten() for m in matrices]).numpy().copy())
    return Gradients(name, shares, shapes)


def networks(data: Path | None) -> Iterator[Gradients]:
    """Yield the gradients of each network, on its data or on noise."""
    folders = {"mnist": "mnist", "resnet34": "cifar10"}
    for name, folder in folders.items():
        torch.manual_seed(1)
        task = BUILDERS[name](data / folder if data else None, images=4096, width=8)
        x, y = task.images.x_train, task.images.y_train

        def images(number: int, task: Any = task, x: Any = x, y: Any = y) -> Any:
            generator = torch.Generator().manual_seed(number)
            chosen = torch.randint(0, len(x), (16,), generator=generator)
            return task.prepare(x[chosen]), y[chosen]

        yield record(task.title, task.build(), images)
    torch.manual_seed(1)
    text = Text.read(data / "shakespeare" / "input.txt" if data else None)
    transformer = Transformer(text.characters, 96, 3, 4, CONTEXT)
    yield record("GPT, characters", transformer, lambda number: text.batch(12, CONTEXT, number))


def minifloat(x: Floats, *, mantissa: int, least: int, most: float) -> Floats:
    """Round to the nearest float of few bits, ties to even; ``least`` is the least exponent."""
    _, exponent = np.frexp(x)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 1, least) - mantissa)
    return np.clip(np.rint(x / step) * step, -most, most).astype(np.float32)


E4M3 = {"mantissa": 3, "least": -6, "most": 448.0}
E3M2 = {"mantissa": 2, "least": -2, "most": 28.0}
E2M1 = {"mantissa": 1, "least": 0, "most": 6.0}


def scaled(x: Floats, size: int, form: dict[str, Any], *, power: bool) -> Floats:
    """Round blocks that share a scale, which is any float32 or a power of two."""
    blocks = np.zeros(-(-x.size // size) * size, dtype=np.float32)
    blocks[: x.size] = x
    blocks = blocks.reshape(-1, size)
    largest = np.maximum(np.abs(blocks).max(axis=1, keepdims=True), np.float32(1e-30))
    if power:
        top = np.frexp(np.float32(form["most"]))[1] - 1
        scale = np.ldexp(np.float32(1), np.frexp(largest)[1] - 1 - top)
    else:
        scale = largest / np.float32(form["most"])
    return (minifloat(blocks / scale, **form) * scale).reshape(-1)[: x.size]


def bfloat16(x: Floats, random: np.random.Generator) -> Floats:
    """Round stochastically to bfloat16."""
    noise = random.integers(0, 1 << 16, x.size, dtype=np.uint32)
    return ((x.view(np.uint32) + noise) & np.uint32(0xFFFF0000)).view(np.float32)


CODES: dict[str, tuple[float, Callable[[Floats, np.random.Generator], Floats]]] = {
    "fp8": (8 + 32 / BUCKET, lambda x, _: scaled(x, BUCKET, E4M3, power=False)),
    "MXFP8": (8.25, lambda x, _: scaled(x, 32, E4M3, power=True)),
    "MXFP6": (6.25, lambda x, _: scaled(x, 32, E3M2, power=True)),
    "MXFP4": (4.25, lambda x, _: scaled(x, 32, E2M1, power=True)),
    "bfloat16": (16.0, bfloat16),
}
OURS = {"QSGD": ("qsgd", (2, 3, 4, 5, 6, 8)), "EDEN": ("eden", (1, 2, 3, 4, 5, 6, 8))}
POWERSGD = (1, 2, 4, 8)


def powersgd(mean: Floats, shapes: list[tuple[int, int]], rank: int) -> tuple[float, Floats]:
    """Return bits per element, and the product of factors that are computed from exact sums."""
    random = np.random.default_rng(1)
    made, sent, at = [], 0, 0
    for rows, columns in shapes:
        matrix = mean[at : at + rows * columns].reshape(rows, columns)
        at += matrix.size
        right = random.standard_normal((columns, rank), dtype=np.float32)
        for _ in range(2):
            left = np.linalg.qr(matrix @ right)[0]
            right = matrix.T @ left
        made.append((left @ right.T).reshape(-1))
        sent += min(rank * (rows + columns), matrix.size)
    return 32 * sent / mean.size, np.concatenate(made)


def measure(found: Gradients) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of ranks and each code."""
    for ranks in RANKS:
        shares = found.shares[:ranks]
        exact = np.stack(shares).sum(axis=0, dtype=np.float64)
        place = {"network": found.of, "ranks": ranks}
        for what, (scheme, choices) in OURS.items():
            for bits in choices:
                spec = _core.CodecSpec(scheme=scheme, bits=bits)
                error = sum_error(shares, spec, "sra")
                yield {**place, "what": what, "bits": bits + 32 / BUCKET, "nmse": error}
        for what, (bits, code) in CODES.items():
            random = np.random.default_rng((1, ranks))
            total = np.sum([code(share, random) for share in shares], axis=0, dtype=np.float32)
            yield {**place, "what": what, "bits": bits, "nmse": nmse(code(total, random), exact)}
        for rank in POWERSGD:
            bits, product = powersgd((exact / ranks).astype(np.float32), found.shapes, rank)
            yield {**place, "what": "PowerSGD", "bits": bits, "nmse": nmse(product * ranks, exact)}


def lines(record: dict[str, Any]) -> list[list[str]]:
    """Return the table: a line for each network and code, errors by ranks."""
    ranks = sorted({row["ranks"] for row in record["rows"]})
    made = [["network", "code", "bits", *(f"{p} ranks" for p in ranks)]]
    by_line: dict[tuple[str, str, float], list[str]] = {}
    for row in record["rows"]:
        key = (row["network"], row["what"], round(row["bits"], 2))
        by_line.setdefault(key, []).append(f"{row['nmse']:.2g}")
    made += [
        [network, what, f"{bits:g}", *shown] for (network, what, bits), shown in by_line.items()
    ]
    return made


TITLE = "Squared error of a sum of recorded gradients over its squared magnitude"
MARKS = {
    "QSGD": "o", "EDEN": "s", "PowerSGD": "^", "fp8": "P", "MXFP8": "X", "MXFP6": "d",
    "MXFP4": "v", "bfloat16": "*",
}  # fmt: skip


def draw(record: dict[str, Any]) -> Any:
    """Return the figure: error over bits, a chart for each network; hollow marks: 64 ranks."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["network"] for row in record["rows"]))
    figure, charts = plt.subplots(1, len(names), figsize=(3.3 * len(names), 3.6), sharey=True)
    for axes, name in zip(charts, names, strict=True):
        for i, (what, mark) in enumerate(MARKS.items()):
            for ranks in (RANKS[0], RANKS[-1]):
                rows = [
                    row
                    for row in record["rows"]
                    if (row["network"], row["what"], row["ranks"]) == (name, what, ranks)
                ]
                few = ranks == RANKS[0]
                axes.plot(
                    [row["bits"] for row in rows], [row["nmse"] for row in rows],
                    color=f"C{i}", marker=mark, ms=4, lw=1.2, ls="-" if few else ":",
                    mfc=None if few else "none", label=what if few else None,
                )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        axes.set_title(name, loc="left", fontsize=8)
        axes.set_xlabel("bits per element")
    charts[0].set_ylabel("squared error of the sum")
    figure.legend(*charts[0].get_legend_handles_labels(), loc="lower center", ncols=8,
                  frameon=False, fontsize=8)  # fmt: skip
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    return figure


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="has mnist, cifar10, shakespeare; default: noise")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record, too")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw it, too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="only print this record")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = parse_args()
    if args.markdown:
        kept = json.loads(args.markdown.read_text())
        print(markdown(TITLE, lines(kept)))
    else:
        torch.set_num_threads(1)
        hvd.init()  # a job of one rank, which the lessons' data loaders require
        kept = {
            "schema": SCHEMA,
            "version": qsgd_hpc.__version__,
            "date": datetime.date.today().isoformat(),
            "data": args.data is not None,
            "rows": [row for found in networks(args.data) for row in measure(found)],
        }
        if args.json:
            args.json.write_text(json.dumps(kept) + "\n")
        show(TITLE, lines(kept))
    if args.png:
        import matplotlib

        from qsgd_hpc.scaling.report.drawing.style import STYLE

        matplotlib.use("Agg")
        with matplotlib.rc_context(STYLE):
            draw(kept).savefig(args.png, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
