"""QSGD and its wire format written a second time, in numpy, straight from the definitions.

The core is compared with it byte by byte; its AES round is checked against FIPS-197, its noise
against published vectors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TILE = 64
TILE_BLOCKS = 8
ROUNDS = 5
PHILOX_ROUNDS = 7
MOST = float(np.finfo(np.float32).max)
Bytes = NDArray[np.uint8]


def gf_times(a: int, b: int) -> int:
    """Multiply in GF(2^8) modulo x^8 + x^4 + x^3 + x + 1 (FIPS-197, section 4.2)."""
    product = 0
    for bit in range(8):
        product ^= (a << bit) if b >> bit & 1 else 0
    for bit in range(14, 7, -1):
        product ^= (0x11B << (bit - 8)) if product >> bit & 1 else 0
    return product


def substitute(x: int) -> int:
    """SubBytes (FIPS-197, section 5.1.1): the inverse in GF(2^8), then an affine map of bits."""
    inverse = next((y for y in range(256) if gf_times(x, y) == 1), 0)
    out = 0
    for bit in range(8):
        turned = (inverse >> (bit + k) % 8 & 1 for k in (0, 4, 5, 6, 7))
        out |= (sum(turned) % 2 ^ (0x63 >> bit & 1)) << bit
    return out


SBOX = np.array([substitute(x) for x in range(256)], dtype=np.uint8)
TWICE = np.array([gf_times(x, 2) for x in range(256)], dtype=np.uint8)
THRICE = np.array([gf_times(x, 3) for x in range(256)], dtype=np.uint8)


def aes_round(state: Bytes, key: Bytes, *, last: bool = False) -> Bytes:
    """One AES round of states with shape (n, 16), byte r + 4 c being row r of column c."""
    s = SBOX[state].reshape(-1, 4, 4)  # state, column, row
    s = np.stack([np.roll(s[:, :, row], -row, axis=1) for row in range(4)], axis=2)  # ShiftRows
    if not last:
        a, b, c, d = (s[:, :, row] for row in range(4))
        s = np.stack(
            [
                TWICE[a] ^ THRICE[b] ^ c ^ d,
                a ^ TWICE[b] ^ THRICE[c] ^ d,
                a ^ b ^ TWICE[c] ^ THRICE[d],
                THRICE[a] ^ b ^ c ^ TWICE[d],
            ],
            axis=2,
        )
    return s.reshape(-1, 16) ^ key


def ars(counter: NDArray[np.uint64], key: tuple[int, int], rounds: int) -> NDArray[np.uint64]:
    """ARS4x32 (Salmon et al., SC'11) of counters with shape (n, 2), the lower half first."""
    low, high = key
    keys = []
    for _ in range(rounds + 1):
        keys.append(np.array([low, high], dtype="<u8").view(np.uint8))
        low = (low + 0x9E3779B97F4A7C15) % 2**64
        high = (high + 0xBB67AE8584CAA73B) % 2**64
    state = np.ascontiguousarray(counter, dtype="<u8").view(np.uint8) ^ keys[0]
    for i in range(1, rounds + 1):
        state = aes_round(state, keys[i], last=i == rounds)
    return np.ascontiguousarray(state).view("<u8")


def philox(counter: NDArray[np.uint32], key: tuple[int, int], rounds: int) -> NDArray[np.uint32]:
    """Philox4x32 (Salmon et al., SC'11) of counters with shape (n, 4)."""
    x = counter.astype(np.uint64)
    keys = np.array(key, dtype=np.uint64)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(rounds):
        a, b = x[:, 0] * np.uint64(0xD2511F53), x[:, 2] * np.uint64(0xCD9E8D57)
        x = np.stack(
            [b >> shift ^ x[:, 1] ^ keys[0], b & low, a >> shift ^ x[:, 3] ^ keys[1], a & low],
            axis=1,
        )
        keys = (keys + np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)) & low
    return x.astype(np.uint32)


def stirred(seed: int, tensor: int) -> int:
    """Return Philox's key for a tensor, by SplitMix64 (Steele et al., OOPSLA'14)."""
    x = (seed + 0x9E3779B97F4A7C15 * (tensor + 1)) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def noise(
    count: int,
    *,
    seed: int,
    tensor: int,
    step: int,
    rank: int,
    phase: int = 1,
    first_tile: int = 0,
    generator: str = "ars",
) -> NDArray[np.uint16]:
    """Return 16-bit noise for ``count`` elements, a multiple of 64, from a tile of a tensor on."""
    blocks = count // TILE * TILE_BLOCKS
    counter = np.empty((blocks, 2), dtype="<u8")
    counter[:, 0] = np.arange(blocks, dtype=np.uint64) + np.uint64(first_tile * TILE_BLOCKS)
    counter[:, 1] = ((rank << 4 | phase) << 32) + step
    if generator == "philox":
        both = stirred(seed, tensor)
        key = (both % 2**32, both >> 32)
        halves = philox(counter.view("<u4"), key, PHILOX_ROUNDS).view("<u2")
        # tile, j, half tile z, word c, half h: element 32 z + 16 h + 4 j + c.
        return halves.reshape(-1, 4, 2, 4, 2).transpose(0, 2, 4, 1, 3).reshape(-1)
    halves = ars(counter, (seed, tensor), ROUNDS).view("<u2")
    # tile, half tile, word of four blocks, half word: element 32 z + 16 h + l.
    return halves.reshape(-1, 2, 16, 2).transpose(0, 1, 3, 2).reshape(-1)


def lane_squares(x: NDArray[np.float32]) -> float:
    """Sum squares in the core's order: element i to partial sum i % 32, then the sums in halves."""
    padded = np.zeros((-(-x.size // 32), 32))
    padded.reshape(-1)[: x.size] = x.astype(np.float64) ** 2
    lanes = np.cumsum(padded, axis=0)[-1]
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(lanes[0])


def fixed_point(x: NDArray[np.float32], norm: np.float32, levels: int) -> NDArray[np.int64]:
    """Return s x / norm with 16 bits behind the point, computed in float32."""
    whole = np.float32(levels * 65536)
    with np.errstate(over="ignore"):
        scale = whole / norm
    if np.isinf(scale):  # the smallest norms: both are lifted
        x, scale = x * np.float32(2.0**64), whole / (norm * np.float32(2.0**64))
    return np.rint(x * scale).astype(np.int64)


def quantise_bucket(
    x: NDArray[np.float32],
    draw: NDArray[np.uint16] | None,
    *,
    bits: int,
    norm: str,
    contract: bool = False,
) -> tuple[np.float32, Bytes]:
    """Return a bucket's scale and its codes. ``draw`` is None to round to the nearest level."""
    levels = 2 ** (bits - 1) - 1
    energy = lane_squares(x)
    n = np.abs(x).max() if norm == "max" else np.float32(min(energy**0.5, MOST))
    if not n > 0:
        return np.float32(0), np.full(x.size, levels, dtype=np.uint8)
    y = fixed_point(x, n, levels)
    up = np.where(y < 0, 32767, 32768) if draw is None else draw.astype(np.int64)
    codes = (levels + ((y + up) >> 16)).astype(np.uint8)
    if contract and draw is not None:
        f = y & 0xFFFF
        unit = float(n) / levels
        w = unit * unit * (float((f * (65536 - f)).sum()) * 2.0**-32) / energy
        n = n * np.float32(1 / (1 + w)) if w >= 1 else n
    return n, codes


def quantise(
    x: NDArray[np.float32],
    *,
    bits: int,
    bucket: int,
    norm: str,
    rounding: str = "stochastic",
    contract: bool = False,
    phase: int = 1,
    generator: str = "ars",
    **key: int,
) -> tuple[NDArray[np.float32], Bytes]:
    """Return the scales and the codes, one byte per element, padded to whole tiles."""
    padded = np.zeros(-(-x.size // TILE) * TILE, dtype=np.float32)
    padded[: x.size] = x
    draws = noise(padded.size, phase=phase, generator=generator, **key)
    scales, codes = [], np.empty(padded.size, dtype=np.uint8)
    for begin in range(0, padded.size, bucket):
        part = slice(begin, begin + bucket)
        draw = draws[part] if rounding == "stochastic" else None
        scale, codes[part] = quantise_bucket(
            padded[part], draw, bits=bits, norm=norm, contract=contract
        )
        scales.append(scale)
    return np.array(scales, dtype=np.float32), codes


def pack(codes: Bytes, bits: int) -> Bytes:
    """Pack codes tile by tile: fields of 8, 4, 2, 1 bits, the highest bits first.

    In a field of f bits, byte i holds elements i, i + 8 f, i + 16 f...
    """
    tiles = codes.reshape(-1, TILE)
    packed = []
    left = bits
    for field in (8, 4, 2, 1):
        if not bits & field:
            continue
        left -= field
        values = (tiles >> left) & (2**field - 1)
        parts = values.reshape(-1, 8 // field, 8 * field)
        packed.append(sum(parts[:, i].astype(np.uint16) << (field * i) for i in range(8 // field)))
    return np.concatenate(packed, axis=1).astype(np.uint8).reshape(-1)


def dequantise(
    norms: NDArray[np.float32], codes: Bytes, *, bits: int, bucket: int, count: int
) -> NDArray[np.float32]:
    """Return the values of the codes."""
    levels = 2 ** (bits - 1) - 1
    units = np.repeat(norms / np.float32(levels), bucket)[: codes.size]
    values: NDArray[np.float32] = (codes.astype(np.int32) - levels).astype(np.float32) * units
    return values[:count]
