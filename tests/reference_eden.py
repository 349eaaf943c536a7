"""EDEN's code written a second time, in numpy, straight from its formulae.

A bucket of d elements, a power of two, with zeros behind a last short one, becomes

    y = H D2 H D1 x,  q_i = the level nearest to z_i = y_i sqrt(d) / |x|,  u = |x| sqrt(d) / <z, q>

and comes back as u D1 H D2 H q, where H is the Hadamard matrix over sqrt(d), and D1 and D2 are the
signs of a seed of 15 bits, which travels in the lowest bits of u.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from tests import reference, reference_schemes

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
SEED_BITS = 15
LEAST = 2.0**-110
FAINT, STRONG = 2.0**-100, 2.0**100


@functools.cache
def lloyd_max(bits: int) -> NDArray[np.float64]:
    """Return the levels above zero of N(0, 1)'s quantiser with 2^bits levels, by Newton's method.

    Each level is the mean of the interval around it, whose ends lie halfway to its neighbours.
    """
    n = 2 ** (bits - 1)
    share = (np.arange(n) + 0.5) / n
    levels = 1.732 * np.array([_quantile(s) for s in share])  # of density^(1/3), N(0, 3)
    for _ in range(50):
        edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
        beyond = np.array([math.erfc(e / math.sqrt(2)) / 2 for e in edges])
        within = beyond[:-1] - beyond[1:]
        mean = (density[:-1] - density[1:]) / within
        inner = edges[1:-1]
        # How the mean follows its upper and its lower end, and these the two levels beside them.
        upper = density[1:-1] * (inner - mean[:-1]) / within[:-1] / 2
        lower = density[1:-1] * (mean[1:] - inner) / within[1:] / 2
        slope = np.diag(np.append(upper, 0) + np.append(0, lower)) - np.eye(n)
        slope += np.diag(upper, 1) + np.diag(lower, -1)
        step = np.linalg.solve(slope, mean - levels)
        levels = levels - step
        if np.abs(step).max() < 1e-14:
            break
    return levels


def _quantile(share: float) -> float:
    """Return x such that a normal element's magnitude is below it with this probability."""
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erf(middle / math.sqrt(2)) < share else (low, middle)
    return low


def levels_of(bits: int) -> Floats:
    return lloyd_max(bits).astype(np.float32)


def edges_of(bits: int) -> Floats:
    """Return the least z of each level but the first: midpoints, their number in the last byte."""
    levels = levels_of(bits)
    middle = (levels[1:] + levels[:-1]) / np.float32(2)
    number = np.arange(middle.size, dtype=np.uint32)
    return (middle.view(np.uint32) & np.uint32(0xFFFFFF00) | number).view(np.float32)


def mixed(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Hash 32 bits to 32 bits: a bijection (C. Wellons, Prospecting for hash functions, 2018)."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


def signs(seed: int, which: int, size: int) -> Floats:
    """Return the diagonal of D1 (which = 0) or D2 (1): element 512 b + 16 k + l has bit 31 - k of
    word 16 b + l."""
    words = mixed(
        np.arange(max(16, size // 32), dtype=np.uint32) + np.uint32(seed << 12 | which << 11)
    ).reshape(-1, 1, 16)
    bits = words >> np.arange(31, -1, -1, dtype=np.uint32).reshape(1, 32, 1) & 1
    return np.where(bits.reshape(-1)[:size], np.float32(-1), np.float32(1))


def hadamard(x: Floats, *, rising: bool) -> Floats:
    """Multiply by the Hadamard matrix, in stages of rising or falling distances."""
    distances = [2**i for i in range(x.size.bit_length() - 1)]
    for distance in distances if rising else reversed(distances):
        pairs = x.reshape(-1, 2, distance)
        a, b = pairs[:, 0], pairs[:, 1]
        x = np.stack([a + b, a - b], axis=1).reshape(-1)
    return x


def tree_sum(terms: Floats) -> np.float32:
    """Add in float32 in the core's order: rows of 16 elements in pairs, then those in halves."""
    rows = terms.reshape(-1, 16)
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    lanes = rows[0]
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return np.float32(lanes[0])


def seed_of(
    first_tile: int, *, seed: int, tensor: int, step: int, rank: int, phase: int = 1
) -> int:
    """Return the seed of a bucket: the lowest bits of the first block of its noise, Philox's."""
    both = reference.stirred(seed, tensor)
    block = first_tile * reference.TILE_BLOCKS
    counter = np.array([[block % 2**32, block >> 32, step, rank << 4 | phase]], dtype=np.uint32)
    drawn = reference.philox(counter, (both % 2**32, both >> 32), reference.PHILOX_ROUNDS)
    return int(drawn[0, 0]) % 2**SEED_BITS


def padded(count: int) -> int:
    return max(reference.TILE, 1 << (count - 1).bit_length())


def with_seed(u: np.float32, seed: int) -> np.float32:
    """Return the float32 nearest to u whose lowest bits are the seed."""
    bits = int(min(u, np.finfo(np.float32).max).view(np.uint32))
    cell = 2**SEED_BITS
    near = (bits - seed + cell // 2) // cell * cell + seed
    return np.uint32(near - cell if near >= 0x7F800000 else near).view(np.float32)


def encode_bucket(x: Floats, bits: int, seed: int, rotations: int = 2) -> tuple[np.float32, Codes]:
    """Return the scale and the codes. One rotation instead of two is not EDEN: for comparison."""
    size = padded(x.size)
    nothing = np.zeros(size, dtype=np.uint8)
    if not x.any():
        return np.float32(0), nothing
    value, lift = np.zeros(size, dtype=np.float32), np.float32(1)
    value[: x.size] = x
    with np.errstate(over="ignore", under="ignore"):
        energy = tree_sum(value * value)
    if not FAINT <= energy <= STRONG:
        exponent = int(np.abs(x).max().view(np.uint32)) >> 23
        lift = np.float32(2.0 ** min(max(127 - exponent, -126), 126))
        value *= lift
        energy = tree_sum(value * value)
    y = hadamard(value * signs(seed, 0, size), rising=True)
    if rotations == 2:
        y = hadamard(y * signs(seed, 1, size), rising=False)
    d, grow = np.float32(size), np.float32(2.0 ** (bits - 2))
    length = d if rotations == 2 else np.sqrt(d)
    z = y * (grow * np.sqrt(d / energy) / length)
    edges, levels = edges_of(bits) * grow, levels_of(bits)
    magnitude = np.abs(z)
    code = np.searchsorted(edges, magnitude, side="left")
    match = tree_sum(magnitude * levels[code])
    with np.errstate(over="ignore"):
        u = grow * np.sqrt(d * energy) / match / lift
    if u < LEAST:
        return np.float32(0), nothing
    return with_seed(u, seed), (code + np.signbit(z) * 2 ** (bits - 1)).astype(np.uint8)


def decode_bucket(u: np.float32, codes: Codes, bits: int, rotations: int = 2) -> Floats:
    size, seed = codes.size, int(u.view(np.uint32)) % 2**SEED_BITS
    if u == 0:
        return np.zeros(size, dtype=np.float32)
    levels = levels_of(bits)
    values = np.concatenate([levels, -levels])[codes]
    if rotations == 2:
        values = hadamard(values, rising=True) * signs(seed, 1, size)
    values = hadamard(values, rising=False) * signs(seed, 0, size)
    length = size if rotations == 2 else np.float32(math.sqrt(size))
    most = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        return np.clip(values * (u / np.float32(length)), -most, most)


def message_body(x: Floats, *, bits: int, bucket: int, first_tile: int = 0, **key: int) -> Codes:
    """Return the scales and packed codes of a tensor, as they travel behind the header."""
    scales, codes = [], [np.zeros(0, dtype=np.uint8)]
    for begin in range(0, x.size, bucket):
        seed = seed_of(first_tile + begin // reference.TILE, **key)
        scale, code = encode_bucket(x[begin : begin + bucket], bits, seed)
        scales.append(scale)
        codes.append(reference.pack(code, bits))
    return np.concatenate([np.array(scales, dtype=np.float32).view(np.uint8), *codes])


def decode_body(body: Codes, *, bits: int, bucket: int, count: int) -> Floats:
    """Return the values of what message_body wrote."""
    buckets = -(-count // bucket)
    scales = body[: 4 * buckets].view(np.float32)
    codes = reference_schemes.unpack(body[scales.nbytes :], bits)
    values = [np.zeros(0, dtype=np.float32)]
    for i, scale in enumerate(scales):
        size = bucket if (i + 1) * bucket <= count else padded(count - i * bucket)
        values.append(decode_bucket(scale, codes[i * bucket : i * bucket + size], bits))
    return np.concatenate(values)[:count]
