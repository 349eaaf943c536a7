"""QSGD and its wire format written a second time, in numpy, straight from the definitions.

The core is compared with it byte by byte; its Philox is checked against published vectors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TILE = 64
LANES = 8
ROUNDS = 7


def philox4x32(
    counter: NDArray[np.uint32], key: tuple[int, int], rounds: int
) -> NDArray[np.uint32]:
    """Philox4x32 (Salmon et al., SC'11) of counters with shape (n, 4)."""
    c = [counter[:, i].astype(np.uint64) for i in range(4)]
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    for _ in range(rounds):
        p0 = np.uint64(0xD2511F53) * c[0]
        p1 = np.uint64(0xCD9E8D57) * c[2]
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, axis=1).astype(np.uint32)


def noise(count: int, *, seed: int, tensor: int, step: int, rank: int, phase: int) -> NDArray:
    """Return 16-bit noise for elements 0..count of a tensor; count is a multiple of 64."""
    tiles = count // TILE
    counter = np.empty((tiles * LANES, 4), dtype=np.uint32)
    counter[:, 0] = np.arange(tiles * LANES)
    counter[:, 1] = tensor
    counter[:, 2] = step
    counter[:, 3] = (rank << 4) | phase
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32), ROUNDS)
    by_tile = words.reshape(tiles, LANES, 4)
    halves = np.stack([by_tile & 0xFFFF, by_tile >> 16], axis=-1)  # tile, lane, word, half
    return halves.transpose(0, 2, 3, 1).reshape(-1)


def quantise(
    x: NDArray[np.float32],
    *,
    bits: int,
    bucket: int,
    norm: str,
    seed: int,
    tensor: int,
    step: int,
    rank: int,
    phase: int = 1,
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return the norms and the codes, one byte per element, padded to whole tiles."""
    levels = np.float32(2 ** (bits - 1) - 1)
    padded = np.zeros(-(-x.size // TILE) * TILE, dtype=np.float32)
    padded[: x.size] = x
    u = (noise(padded.size, seed=seed, tensor=tensor, step=step, rank=rank, phase=phase)
         .astype(np.float32) + np.float32(0.5)) * np.float32(2**-16)  # fmt: skip
    norms, codes = [], np.empty(padded.size, dtype=np.uint8)
    for begin in range(0, padded.size, bucket):
        part = padded[begin : begin + bucket]
        n = (
            np.abs(part).max()
            if norm == "max"
            else np.float32(np.sqrt(np.cumsum(part.astype(np.float64) ** 2)[-1]))
        )
        norms.append(n)
        level = np.zeros(part.size, dtype=np.int64)
        if n > 0:
            level = np.minimum(
                (np.abs(part) * (levels / n) + u[begin : begin + bucket]).astype(np.int64), levels
            ).astype(np.int64)
        codes[begin : begin + bucket] = int(levels) + np.where(np.signbit(part), -level, level)
    return np.array(norms, dtype=np.float32), codes


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack codes tile by tile: byte i of a tile holds elements i, i + stride, i + 2 stride..."""
    per_byte = 8 // bits
    tiles = codes.reshape(-1, per_byte, TILE // per_byte).astype(np.uint16)
    packed = np.zeros((tiles.shape[0], TILE // per_byte), dtype=np.uint16)
    for i in range(per_byte):
        packed |= tiles[:, i] << (bits * i)
    return packed.astype(np.uint8).reshape(-1)


def dequantise(
    norms: NDArray[np.float32], codes: NDArray[np.uint8], *, bits: int, bucket: int, count: int
) -> NDArray[np.float32]:
    """Return the values of the codes."""
    levels = 2 ** (bits - 1) - 1
    units = np.repeat(norms / np.float32(levels), bucket)[: codes.size]
    values: NDArray[np.float32] = (codes.astype(np.int32) - levels).astype(np.float32) * units
    return values[:count]
