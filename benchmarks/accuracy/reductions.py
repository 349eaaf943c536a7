"""Measure the error of each compressed reduction, relative to its code's, on 2 to 64 ranks.

    python benchmarks/accuracy/reductions.py --json reductions-nmse.json
    python benchmarks/accuracy/reductions.py --markdown reductions-nmse.json

The ranks are threads of this process and run the same code as those of a job. Each has its own
gradient of normally distributed elements. w is the error of the code alone. The table has the
squared error of the sum over its squared magnitude, as a multiple of w, and that of the formula.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from formulas import FORMULAS
from numpy.typing import NDArray
from tables import markdown, show

import qsgd_hpc
from qsgd_hpc import _core

SCHEMA = 1
RANKS = (2, 4, 8, 16, 32, 64)
Floats = NDArray[np.float32]


def gradients(ranks: int, count: int, seed: int) -> list[Floats]:
    """Return a gradient for each rank."""
    generator = np.random.default_rng((seed, ranks))
    return [generator.standard_normal(count, dtype=np.float32) for _ in range(ranks)]


def nmse(got: NDArray[Any], exact: NDArray[Any]) -> float:
    """Return the squared error over the squared magnitude."""
    wide = exact.astype(np.float64)
    return float(((got - wide) ** 2).sum() / (wide**2).sum())


def code_error(shares: list[Floats], spec: _core.CodecSpec) -> float:
    """Return w: the mean NMSE of the shares, each coded and decoded once by its rank."""
    errors = []
    for rank, share in enumerate(shares):
        message = _core.encode(share, spec=spec, rank=rank)
        errors.append(nmse(_core.decode(message, count=share.size, spec=spec), share))
    return float(np.mean(errors))


def sum_error(shares: list[Floats], spec: _core.CodecSpec, algorithm: str) -> float:
    """Return the NMSE of the sum, which must be the same on all ranks."""
    results = [[share.copy()] for share in shares]
    _core.thread_allreduce(results, coding=spec, algorithm=algorithm, ids=[1])
    if any(result[0].tobytes() != results[0][0].tobytes() for result in results):
        raise AssertionError(f"{algorithm} on {len(shares)} ranks: the ranks' results differ")
    return nmse(results[0][0], np.stack(shares).sum(axis=0, dtype=np.float64))


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of ranks and each algorithm."""
    spec = _core.CodecSpec(bits=args.bits)
    for ranks in RANKS:
        shares = gradients(ranks, args.elements, args.seed)
        w = code_error(shares, spec)
        for algorithm, formula in FORMULAS.items():
            error = sum_error(shares, spec, algorithm)
            yield {
                "ranks": ranks,
                "algorithm": algorithm,
                "w": w,
                "nmse": error,
                "over_w": error / w,
                "expected_over_w": formula(w, ranks) / w,
            }


def lines(record: dict[str, Any]) -> list[list[str]]:
    """Return the table: its heading, then a line for each number of ranks."""
    shown = {(row["ranks"], row["algorithm"]): row for row in record["rows"]}
    made = [["ranks", "w", *FORMULAS]]
    for ranks in sorted({row["ranks"] for row in record["rows"]}):
        rows = [shown[ranks, algorithm] for algorithm in FORMULAS]
        cells = [f"{row['over_w']:.2f} ({row['expected_over_w']:.2f})" for row in rows]
        made.append([str(ranks), f"{rows[0]['w']:.3g}", *cells])
    return made


def title(record: dict[str, Any]) -> str:
    """Return the title, with the settings of all rows."""
    return (
        f"NMSE of the sum over w, and the formula's, of {record['elements']:,} normally "
        f"distributed elements in {record['bits']} bits, {record['bucket_size']} a bucket"
    )


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bits", type=int, default=8, help="bits of the code (default 8)")
    parser.add_argument("--elements", type=int, default=1 << 19, help="(default 524288)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the gradients (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record, too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="only print this record")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = parse_args()
    if args.markdown:
        record = json.loads(args.markdown.read_text())
        print(markdown(title(record), lines(record)))
        return
    record = {
        "schema": SCHEMA,
        "version": qsgd_hpc.__version__,
        "date": datetime.date.today().isoformat(),
        "bits": args.bits,
        "bucket_size": _core.CodecSpec(bits=args.bits).bucket_size,
        "elements": args.elements,
        "seed": args.seed,
        "rows": list(measure(args)),
    }
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    show(title(record), lines(record))


if __name__ == "__main__":
    main()
