"""The codes besides QSGD's own, written a second time in numpy, straight from their definitions.

Each function takes one bucket and returns what travels: its scales and one code per element.
``u`` is the rounding threshold of every element, in (0, 1); None rounds to the nearest level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests import reference

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
FLOAT_MAX = float(np.finfo(np.float32).max)
FLOAT_TINY = float(np.finfo(np.float32).tiny)


def lane_sum(terms: NDArray[np.float64]) -> float:
    """Add in the core's order: eight interleaved running sums, then those from left to right."""
    padded = np.zeros((-(-terms.size // 8), 8))
    padded.reshape(-1)[: terms.size] = terms
    return float(np.cumsum(np.cumsum(padded, axis=0)[-1])[-1])


def thresholds(count: int, bucket: int, **key: int) -> NDArray[np.float64]:
    """Return u for elements 0..count of a tensor, padded to whole tiles."""
    padded = -(-count // reference.TILE) * reference.TILE
    noise = reference.noise(padded, phase=1, **key)
    return (noise.astype(np.float64) + 0.5) * 2.0**-16


def take_up(fraction: NDArray, u: NDArray | None) -> NDArray[np.int64]:
    return (fraction >= (0.5 if u is None else u)).astype(np.int64)


def shrink(x: Floats, variance: NDArray[np.float64]) -> float:
    """Return 1 / (1 + w) for w >= 1, else 1."""
    energy = lane_sum(x.astype(np.float64) ** 2)
    w = lane_sum(variance) / energy if energy > 0 else 0.0
    return 1 / (1 + w) if w >= 1 else 1.0


def minmax(
    x: Floats, bits: int, _norm: str, u: NDArray | None, contract: bool
) -> tuple[Floats, Codes]:
    levels = 2**bits - 1
    least, most = float(x.min()), float(x.max())
    unit = (most - least) / levels
    if unit < FLOAT_TINY:
        unit = np.ceil(unit * 2.0**149) * 2.0**-149
    unit = float(np.float32(min(unit, FLOAT_MAX)))
    a = np.minimum((x.astype(np.float64) - least) * (1 / unit if unit > 0 else 0.0), levels)
    floor = np.floor(a)
    codes = (floor.astype(np.int64) + take_up(a - floor, u)).astype(np.uint8)
    f = a - floor
    factor = shrink(x, unit * unit * f * (1 - f)) if contract and u is not None else 1.0
    return np.array([least * factor, unit * factor], dtype=np.float32), codes


def nuqsgd(
    x: Floats, bits: int, norm: str, u: NDArray | None, contract: bool
) -> tuple[Floats, Codes]:
    s = 2 ** (bits - 1) - 1
    grid = np.concatenate([[0.0], 2.0 ** np.arange(1 - s, 1)])  # of level 0, 1, ..., s
    if not x.any():
        return np.zeros(1, dtype=np.float32), np.full(x.size, s, dtype=np.uint8)
    n = np.abs(x).max()
    if norm == "l2":
        n = np.float32(min(np.sqrt(lane_sum(x.astype(np.float64) ** 2)), FLOAT_MAX))
    ratio = np.minimum(np.abs(x) / n, np.float32(1)).astype(np.float64)
    lower = np.searchsorted(grid, ratio, side="right") - 1
    gap = np.append(np.diff(grid), 1.0)[lower]
    f = (ratio - grid[lower]) / gap
    level = lower + take_up(f, u)
    codes = (s + np.where(np.signbit(x), -level, level)).astype(np.uint8)
    gap = gap.astype(np.float32).astype(np.float64) * float(n)
    factor = shrink(x, gap * gap * f * (1 - f)) if contract and u is not None else 1.0
    return np.array([float(n) * factor], dtype=np.float32), codes


def terngrad(
    x: Floats, _bits: int, _norm: str, u: NDArray | None, contract: bool
) -> tuple[Floats, Codes]:
    if not x.any():
        return np.zeros(1, dtype=np.float32), np.ones(x.size, dtype=np.uint8)
    sigma = np.sqrt(lane_sum(x.astype(np.float64) ** 2) / x.size)
    top = np.float32(min(2.5 * sigma, float(np.abs(x).max())))
    ratio = np.abs(x) / top
    f = np.where(ratio < 1, ratio, 0).astype(np.float64)
    level = np.where(ratio < 1, take_up(f, u), 1)
    codes = (1 + np.where(np.signbit(x), -level, level)).astype(np.uint8)
    variance = float(top) ** 2 * f * (1 - f)
    factor = shrink(x, variance) if contract and u is not None else 1.0
    return np.array([float(top) * factor], dtype=np.float32), codes


def sign(x: Floats, *_: object) -> tuple[Floats, Codes]:
    mean = lane_sum(np.abs(x).astype(np.float64)) / x.size
    return np.array([mean], dtype=np.float32), (~np.signbit(x)).astype(np.uint8)


def exponential(scales: Floats, codes: NDArray[np.int64], bits: int) -> Floats:
    s = 2 ** (bits - 1) - 1
    level = codes - s
    ratio = np.where(level == 0, 0.0, 2.0 ** (np.abs(level) - s)) * np.sign(level)
    return (ratio * float(scales[0])).astype(np.float32)


def affine(scales: Floats, codes: NDArray[np.int64], bits: int) -> Floats:
    least, unit = scales.astype(np.float64)
    return np.minimum(least + unit * codes, FLOAT_MAX).astype(np.float32)


@dataclass(frozen=True)
class Definition:
    """How one code codes a bucket, and what it makes of that.

    Attributes:
        bits: those that it exists in.
        encode: the bucket, bits, norm, thresholds and whether to contract, to scales and codes.
        decode: scales, codes and bits to values.
        scales: float32 of a bucket.
    """

    bits: Sequence[int]
    encode: Callable[[Floats, int, str, NDArray | None, bool], tuple[Floats, Codes]]
    decode: Callable[[Floats, NDArray[np.int64], int], Floats]
    scales: int = 1


DEFINITIONS = {
    "minmax": Definition(range(1, 9), minmax, affine, scales=2),
    "nuqsgd": Definition(range(2, 9), nuqsgd, exponential),
    "terngrad": Definition(
        [2],
        terngrad,
        lambda scales, codes, _: ((codes - 1) * scales[0]).astype(np.float32),
    ),
    "sign": Definition(
        [1],
        sign,
        lambda scales, codes, _: np.where(codes == 1, scales[0], -scales[0]),
    ),
}


def pack(codes: Codes, bits: int) -> Codes:
    """Pack whole tiles: the fields of 8, 4, 2 and 1 bits that make up `bits`, high bits first."""
    fields, left = [], bits
    for width in (8, 4, 2, 1):
        if left >= width:
            left -= width
            field = (codes >> left) & (2**width - 1)
            fields.append(reference.pack(field.astype(np.uint8), width).reshape(-1, 8 * width))
    return np.concatenate(fields, axis=1).reshape(-1) if codes.size else codes


def message_body(
    x: Floats, *, scheme: str, bits: int, bucket: int, norm: str = "max",
    rounding: str = "stochastic", contract: bool = False, **key: int,
) -> Codes:  # fmt: skip
    """Return the scales and packed codes of a tensor, as they travel behind the header."""
    u = thresholds(x.size, bucket, **key)
    scales, codes = [], []
    for begin in range(0, x.size, bucket):
        part = x[begin : begin + bucket]
        drawn = u[begin : begin + part.size] if rounding == "stochastic" else None
        scale, code = DEFINITIONS[scheme].encode(part, bits, norm, drawn, contract)
        scales.append(scale.view(np.uint8))
        padded = np.zeros(-(-part.size // reference.TILE) * reference.TILE, dtype=np.uint8)
        padded[: part.size] = code
        codes.append(pack(padded, bits))
    return np.concatenate([*scales, *codes]) if x.size else np.zeros(0, dtype=np.uint8)


def decode_body(body: Codes, *, scheme: str, bits: int, bucket: int, count: int) -> Floats:
    """Return the values of what message_body wrote."""
    definition = DEFINITIONS[scheme]
    buckets = -(-count // bucket)
    scales = (
        body[: 4 * definition.scales * buckets].view(np.float32).reshape(buckets, definition.scales)
    )
    codes = unpack(body[scales.nbytes :], bits)
    parts = [np.zeros(0, dtype=np.float32)]
    for i in range(buckets):
        part = codes[i * bucket : min((i + 1) * bucket, count)].astype(np.int64)
        parts.append(definition.decode(scales[i], part, bits))
    return np.concatenate(parts)


def unpack(packed: Codes, bits: int) -> Codes:
    """Return the codes of whole tiles, the inverse of pack."""
    tiles = packed.reshape(-1, reference.TILE // 8 * bits)
    codes = np.zeros((tiles.shape[0], reference.TILE), dtype=np.uint8)
    at, left = 0, bits
    for width in (8, 4, 2, 1):
        if left >= width:
            left -= width
            field = tiles[:, at : at + 8 * width]
            parts = [(field >> (width * i)) & (2**width - 1) for i in range(8 // width)]
            codes |= (np.concatenate(parts, axis=1) << left).astype(np.uint8)
            at += 8 * width
    return codes.reshape(-1)
