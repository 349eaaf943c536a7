#!/usr/bin/env python3
"""Test 10^9 draws of the rounding noise for uniformity in 16 bits and for independence.

    python benchmarks/noise/look.py
    python benchmarks/noise/look.py --generator philox --draws 1e8

Prints a statistic for each test that is standard normal for perfect noise: a magnitude above 4
occurs once in 16,000 tests. The tests:

- equal frequency of all 65,536 values (chi-squared);
- equal frequency of all pairs of neighbours' upper bytes, which decide most roundings (the same);
- correlation with the draw 1, 2, 4, 16, 32, 64 or 512 elements later;
- correlation with draws of the same elements for another rank, tensor, step or seed.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

import numpy as np
from numpy.typing import NDArray

from qsgd_hpc import _core

TILE = 64
CHUNK = 1 << 24
LAGS = (1, 2, 4, 16, 32, 64, 512)
KEY = {"seed": 20260101, "tensor": 7, "step": 1000, "rank": 3}
VALUES = 1 << 16
MEAN = (VALUES - 1) / 2
VARIANCE = (VALUES**2 - 1) / 12
SUSPECT = 4.0
Draws = NDArray[np.uint16]


def from_chi_squared(counts: NDArray[np.int64]) -> float:
    """Return the chi-squared of equal frequencies as a standard normal (Wilson and Hilferty)."""
    expected = counts.sum() / counts.size
    chi_squared = float(((counts - expected) ** 2).sum() / expected)
    freedom = counts.size - 1
    spread = 2 / (9 * freedom)
    return ((chi_squared / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


class Correlation:
    """Sums up products of pairs of draws."""

    def __init__(self) -> None:
        self.sum = 0.0
        self.pairs = 0

    def take(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> None:
        self.sum += float(a @ b)
        self.pairs += a.size

    @property
    def normal(self) -> float:
        return self.sum / (VARIANCE * math.sqrt(self.pairs))


def centred(draws: Draws) -> NDArray[np.float64]:
    return draws.astype(np.float64) - MEAN


def look(generator: str, wanted: int) -> dict[str, float]:
    """Return the statistic of each test."""
    values = np.zeros(VALUES, dtype=np.int64)
    pairs = np.zeros(VALUES, dtype=np.int64)
    serial = {lag: Correlation() for lag in LAGS}
    others = {name: Correlation() for name in KEY}
    changed = {name: {**KEY, name: KEY[name] + 1} for name in KEY}
    for first in range(0, wanted, CHUNK):
        size = min(CHUNK, wanted - first)
        tiles = -(-size // TILE)
        draws = _core.noise(first_tile=first // TILE, tiles=tiles, generator=generator, **KEY)
        values += np.bincount(draws, minlength=VALUES)
        upper = draws >> 8
        pairs += np.bincount(upper[0::2] << 8 | upper[1::2], minlength=VALUES)
        own = centred(draws)
        for lag, found in serial.items():
            found.take(own[:-lag], own[lag:])
        for name, found in others.items():
            other = _core.noise(
                first_tile=first // TILE, tiles=tiles, generator=generator, **changed[name]
            )
            found.take(own, centred(other))
    return {
        "values": from_chi_squared(values),
        "pairs of upper bytes": from_chi_squared(pairs),
        **{f"{lag} elements later": found.normal for lag, found in serial.items()},
        **{f"another {name}": found.normal for name, found in others.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--generator", choices=("ars", "philox"), default="ars")
    parser.add_argument("--draws", type=float, default=1e9, help="default 1e9")
    options = parser.parse_args()
    start_s = time.perf_counter()
    found = look(options.generator, int(options.draws))
    print(f"{options.generator}: {int(options.draws):,} draws, "
          f"{time.perf_counter() - start_s:.0f} s; standard normal if perfect")  # fmt: skip
    for name, value in found.items():
        print(f"{name:22} {value:+6.2f}{'  SUSPECT' if abs(value) > SUSPECT else ''}")
    return int(any(abs(value) > SUSPECT for value in found.values()))


if __name__ == "__main__":
    sys.exit(main())
