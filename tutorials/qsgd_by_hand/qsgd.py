"""Quantise a gradient as QSGD does, in numpy: buckets, norms, levels, rounding, bytes.

Source: Alistarh et al., QSGD, NeurIPS 2017, section 3.1; here with 2 to 8 bits, sign included.
"""

from __future__ import annotations

import numpy as np

__all__ = ["dequantise", "levels", "pack", "quantise", "unpack", "variance"]


def levels(bits: int) -> int:
    """Return the levels on each side of zero: 1 for 2 bits, 7 for 4, 127 for 8."""
    return 2 ** (bits - 1) - 1


def scaled(x, bits, bucket_size, norm):
    """Cut into buckets, pad the last; return s * x / norm for each bucket, and the norms."""
    buckets = np.zeros((-(-x.size // bucket_size), bucket_size), np.float32)
    buckets.ravel()[: x.size] = x
    norms = abs(buckets).max(axis=1) if norm == "max" else np.linalg.norm(buckets, axis=1)
    safe = np.where(norms > 0, norms, 1)  # a bucket of zeros stays one
    return levels(bits) * buckets / safe[:, None], norms.astype(np.float32)


def quantise(x, bits, rng, *, bucket_size=512, norm="max", rounding="stochastic"):
    """Return a whole number from -s to s for each element, and a float32 norm for each bucket."""
    a, norms = scaled(x, bits, bucket_size, norm)
    if rounding == "nearest":
        return np.rint(a).astype(np.int8), norms
    below = np.floor(abs(a))
    up = rng.random(a.shape) < abs(a) - below  # with the fraction as the probability
    return (np.sign(a) * (below + up)).astype(np.int8), norms


def dequantise(codes, norms, bits, count):
    """Return what the receiver makes of codes and norms."""
    return (norms[:, None] * codes / levels(bits)).ravel()[:count]


def variance(x, bits, *, bucket_size=512, norm="max"):
    """Return the expected squared error of stochastic rounding: (norm/s)^2 * sum of f (1 - f)."""
    a, norms = scaled(x, bits, bucket_size, norm)
    f = abs(a) - np.floor(abs(a))
    return np.sum((norms / levels(bits)) ** 2 * np.sum(f * (1 - f), axis=1))


def pack(codes, norms, bits):
    """Return the bytes of a message: the norms, then the codes, `bits` bits each."""
    unsigned = (codes.ravel() + levels(bits)).astype(np.uint8)  # 0 to 2s
    # unpackbits gives the 8 bits of each byte, the most significant first; the last `bits` count.
    each = np.unpackbits(unsigned[:, None], axis=1)[:, -bits:]
    return norms.tobytes() + np.packbits(each).tobytes()


def unpack(message, bits, count, *, bucket_size=512):
    """Return codes and norms of a message."""
    buckets = -(-count // bucket_size)
    norms = np.frombuffer(message, np.float32, count=buckets)
    packed = np.frombuffer(message, np.uint8, offset=norms.nbytes)
    each = np.unpackbits(packed, count=buckets * bucket_size * bits).reshape(-1, bits)
    unsigned = np.packbits(np.pad(each, ((0, 0), (8 - bits, 0))), axis=1)
    codes = unsigned.astype(np.int8).reshape(buckets, bucket_size) - np.int8(levels(bits))
    return codes, norms
