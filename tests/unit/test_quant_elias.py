"""The paper's Elias coding: against a second coder, the published bounds, and bad input."""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsgd_hpc import _core
from qsgd_hpc.errors import HorovodInternalError, UsageError
from tests import reference_schemes

HEADER_BYTES = 32
SQRT_512 = round(512**0.5)


def gaussian(n, seed=1):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def encode(x, levels, **options):
    return _core.elias_encode(np.asarray(x, dtype=np.float32), levels=levels, **options)


def round_trip(x, levels, **options):
    return _core.elias_decode(encode(x, levels, **options), count=len(x))


def omega(n):
    """Elias's omega code as text, from its recursive definition."""
    code = "0"
    while n > 1:
        code = f"{n:b}" + code
        n = len(f"{n:b}") - 1
    return code


def levels_of(x, s, bucket, **key):
    """Return each bucket's L2 norm and its signed levels."""
    u = reference_schemes.thresholds(x.size, bucket, **key)
    for begin in range(0, x.size, bucket):
        part = x[begin : begin + bucket].astype(np.float64)
        norm = np.float32(np.sqrt(reference_schemes.lane_sum(part**2)))
        a = np.minimum(np.abs(part) * (s / np.float64(norm)), s) if norm > 0 else 0 * part
        level = np.floor(a) + (a - np.floor(a) >= u[begin : begin + part.size])
        yield norm, (np.sign(part) * level).astype(int)


def coded(levels, sparse):
    """Return the bits of one bucket as text."""
    if not sparse:
        return "".join(omega(abs(v) + 1) + ("" if v == 0 else str(int(v < 0))) for v in levels)
    bits, last = "", -1
    for i in np.flatnonzero(levels):
        bits += omega(i - last) + str(int(levels[i] < 0)) + omega(abs(levels[i]))
        last = i
    return bits + (omega(len(levels) - last) if last != len(levels) - 1 else "")


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("levels", [1, 4, SQRT_512, 1000])
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 511, 512, 513, 1300])
def test_message_equals_the_definition_bit_for_bit(n, levels, sparse):
    x = gaussian(n, seed=n)
    key = {"seed": (7 << 32) + 5, "tensor": 9, "step": 11, "rank": 3}
    message = encode(x, levels, sparse=sparse, **key)
    bits, values = "", [np.zeros(0)]
    for norm, level in levels_of(x, levels, 512, **key):
        bits += f"{norm.view(np.uint32):032b}" + coded(level, sparse)
        values.append(float(norm) * level / levels)
    bits += "0" * (-len(bits) % 8)
    expected = bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))
    assert message[HEADER_BYTES:] == expected
    decoded = _core.elias_decode(message, count=n)
    assert np.array_equal(decoded, np.concatenate(values).astype(np.float32))


def test_golden_message_never_changes():
    """The bytes of one message whose elements are on levels, so that no noise is in them."""
    x = np.zeros(70, dtype=np.float32)
    x[[3, 60, 64]] = 3, -4, -2
    message = encode(x, 5, bucket_size=64)
    assert message.hex() == GOLDEN
    assert np.array_equal(_core.elias_decode(message, count=70), x)


GOLDEN = (
    "5153454c0100000002ce02dc050000004600000000000000400000000100000040a00000a1abcb45080000000d5600"
)


@pytest.mark.parametrize("levels", [1, 4, SQRT_512])
def test_decoding_is_unbiased_with_the_exact_variance(levels):
    """Over R draws the squared error of the mean is w/R, and w is (N/s)^2 sum f(1-f) / |v|^2."""
    draws, v = 400, gaussian(512)
    decoded = np.stack([round_trip(v, levels, step=t) for t in range(draws)]).astype(float)
    norm = np.linalg.norm(v.astype(float))
    a = levels * np.abs(v.astype(float)) / norm
    total = ((norm / levels) ** 2 * (a - np.floor(a)) * (1 - a + np.floor(a))).sum()
    error = ((decoded - v) ** 2).sum(axis=1)
    assert error.mean() == pytest.approx(total, rel=6 * error.std() / total / draws**0.5)
    assert ((decoded.mean(axis=0) - v) ** 2).sum() == pytest.approx(total / draws, rel=0.6)


@pytest.mark.parametrize(("levels", "nonzero"), [(1, 18.1), (4, 72.4), (16, 263)])
def test_sparsity_is_the_published_one_and_within_the_bound(levels, nonzero):
    """E|Q|_0 <= s (s + sqrt n)."""
    v = gaussian(512 * 400)
    mean = np.count_nonzero(round_trip(v, levels)) / 400
    assert mean == pytest.approx(nonzero, rel=0.03)
    assert mean <= levels * (levels + 512**0.5)


@pytest.mark.parametrize("n", [512, 4096])
@pytest.mark.parametrize("levels", [1, 2, 4, 8])
def test_sparse_code_stays_within_theorem_3_2(levels, n):
    """(3 + 3/2 log2(2 (s^2 + n) / (s (s + sqrt n)))) s (s + sqrt n) + 32 bits for a bucket."""
    buckets = 200
    for seed, x in enumerate([gaussian(n * buckets), student_t(n * buckets)]):
        message = encode(x, levels, bucket_size=n, seed=seed)
        bits = 8 * (len(message) - HEADER_BYTES) / buckets
        count = levels * (levels + n**0.5)
        assert bits <= (3 + 1.5 * math.log2(2 * (levels**2 + n) / count)) * count + 32


def student_t(n):
    return np.random.default_rng(2).standard_t(4, n).astype(np.float32)


@pytest.mark.parametrize("n", [1024, 4096, 65536])
def test_code_of_sqrt_n_levels_has_the_published_size(n):
    """2.76 to 2.78 bits per element, and 2.8 n + 32 for a bucket at most."""
    buckets = 2**20 // n
    message = encode(gaussian(n * buckets), round(n**0.5), bucket_size=n)
    bits = 8 * (len(message) - HEADER_BYTES) / buckets
    assert bits <= 2.8 * n + 32
    assert 2.75 <= (bits - 32) / n <= 2.79


def test_dense_code_is_shorter_where_few_levels_are_zero():
    x = gaussian(512 * 100)
    for levels, dense_wins in [(1, False), (SQRT_512, False), (4 * SQRT_512, True)]:
        sizes = {sparse: len(encode(x, levels, sparse=sparse)) for sparse in (True, False)}
        assert (sizes[False] < sizes[True]) == dense_wins, levels


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 3e38, -3e38, 1e-38, 1e-45])
def test_equal_elements_stay_finite_and_keep_their_sign(value, sparse):
    decoded = round_trip(np.full(513, value), 7, sparse=sparse)
    assert np.isfinite(decoded).all()
    assert (decoded * np.sign(value) >= 0).all()
    assert decoded[512] == np.float32(value)  # alone in its bucket, it is the norm


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_bucket_decodes_to_nan_and_only_that_bucket(bad, sparse):
    x = gaussian(512 * 3)
    x[512 + 17] = bad
    decoded = round_trip(x, 4, sparse=sparse)
    assert np.array_equal(np.isnan(decoded), np.repeat([False, True, False], 512))


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_any_damaged_byte_is_refused(position, flip):
    message = bytearray(encode(gaussian(700), 4))
    message[position % len(message)] ^= flip
    with pytest.raises(HorovodInternalError, match="refused"):
        _core.elias_decode(bytes(message), count=700)


def sealed(bits, *, levels=4, bucket=64, count=64, sparse=1):
    """Return a message with a right checksum around any bits."""
    bits += "0" * (-len(bits) % 8)
    body = bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))
    rest = struct.pack("<IQII", levels, count, bucket, sparse) + body
    return struct.pack("<III", 0x4C455351, 1, zlib.crc32(rest)) + rest


NORM = f"{np.float32(1).view(np.uint32):032b}"


@pytest.mark.parametrize(
    ("message", "reason"),
    [(sealed(NORM + omega(66)), "outside its bucket"),
     (sealed(NORM + omega(1) + "0" + omega(5)), "level 5 of 4"),
     (sealed(NORM + omega(1) + "0"), "cut short"),
     (sealed(NORM + "1" * 300), "beyond 32 bits"),
     (sealed(NORM + omega(65) + "0" * 16), "left over"),
     (sealed(NORM + omega(65), count=65), "holds 65 elements, expected 64"),
     (sealed(NORM + omega(65), levels=0), "header is damaged"),
     (sealed(NORM + omega(65), bucket=0), "header is damaged"),
     (sealed(NORM + omega(65), sparse=2), "header is damaged"),
     (sealed(NORM + omega(6) * 64, sparse=0), "level 5 of 4"),
     (b"", "only 0 bytes"),
     (b"\0" * 40, "magic")],
)  # fmt: skip
def test_hostile_message_is_refused_with_the_reason(message, reason):
    with pytest.raises(HorovodInternalError, match=reason):
        _core.elias_decode(message, count=64)


def test_message_sealed_here_is_accepted_when_it_is_right():
    bits = NORM + omega(3) + "1" + omega(4) + omega(62)
    decoded = _core.elias_decode(sealed(bits), count=64)
    assert decoded[2] == -1
    assert np.count_nonzero(decoded) == 1


@pytest.mark.parametrize(
    ("options", "remedy"),
    [({"levels": 0}, "choose 1 to"), ({"levels": 2**21}, "choose 1 to"),
     ({"levels": 4, "bucket_size": 100}, "multiple of 64"),
     ({"levels": 4, "bucket_size": 0}, "multiple of 64")],
)  # fmt: skip
def test_bad_settings_name_the_choices(options, remedy):
    with pytest.raises(UsageError, match=remedy):
        encode(gaussian(10), **options)
