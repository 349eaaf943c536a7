"""The codec against its definition, its published properties, and bad input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsgd_hpc import _core
from qsgd_hpc.errors import HorovodInternalError, UsageError
from tests import reference

HEADER_BYTES = 32
BUCKET = 512
BITS = (2, 4, 8)
NORMS = ("max", "l2")


def encode(x, bits=4, norm="max", bucket=BUCKET, **key):
    return _core.encode(
        np.asarray(x, dtype=np.float32), bits=bits, bucket_size=bucket, norm=norm, **key
    )


def decode(message, count, bits=4, norm="max", bucket=BUCKET):
    return _core.decode(message, count=count, bits=bits, bucket_size=bucket, norm=norm)


def round_trip(x, bits=4, norm="max", bucket=BUCKET, **key):
    return decode(encode(x, bits, norm, bucket, **key), len(x), bits, norm, bucket)


def gaussian(n, seed=1):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def test_reference_philox_gives_the_published_vectors():
    """Known answers of the Random123 distribution for 7 and 10 rounds."""
    zeros = np.zeros((1, 4), dtype=np.uint32)
    ones = np.full((1, 4), 0xFFFFFFFF, dtype=np.uint32)
    assert reference.philox4x32(zeros, (0, 0), 10)[0].tolist() == [
        0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # fmt: skip
    assert reference.philox4x32(zeros, (0, 0), 7)[0].tolist() == [
        0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]  # fmt: skip
    assert reference.philox4x32(ones, (0xFFFFFFFF, 0xFFFFFFFF), 7)[0].tolist() == [
        0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]  # fmt: skip


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 511, 512, 513, 1300])
def test_message_equals_the_reference_byte_for_byte(n, bits, norm):
    x = gaussian(n, seed=n)
    key = {"seed": (7 << 32) + 5, "tensor": 9, "step": 11, "rank": 3}
    message = encode(x, bits, norm, **key)
    norms, codes = reference.quantise(x, bits=bits, bucket=BUCKET, norm=norm, **key)
    body = np.concatenate([norms.view(np.uint8), reference.pack(codes, bits)])
    assert message[HEADER_BYTES:].tobytes() == body.tobytes()
    expected = reference.dequantise(norms, codes, bits=bits, bucket=BUCKET, count=n)
    assert np.array_equal(decode(message, n, bits, norm), expected)


def test_golden_message_never_changes():
    """The bytes of one message, so that a new version cannot silently change the format."""
    message = encode(np.linspace(-1, 1, 65), bits=2, seed=1, tensor=2, step=3, rank=4, bucket=64)
    assert message.tobytes().hex() == GOLDEN


GOLDEN = (
    "5153474401020000400000000100000041000000000000007e594176d2914a830000803f0000803f"
    "546451945450949494a45590a4a495a556555555555555555555555555555555"
)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bits", BITS)
def test_decoding_is_unbiased_with_the_exact_variance(bits, norm):
    """Over R draws the squared error of the mean is w/R, and w is (N/s)^2 sum f(1-f) / |v|^2."""
    draws = 400
    v = gaussian(BUCKET)
    decoded = np.stack([round_trip(v, bits, norm, step=t) for t in range(draws)]).astype(float)
    s = 2 ** (bits - 1) - 1
    n = np.abs(v).max() if norm == "max" else np.sqrt(np.sum(v.astype(float) ** 2))
    a = s * np.abs(v.astype(float)) / n
    f = a - np.floor(a)
    variance = (n / s) ** 2 * f * (1 - f)
    total = variance.sum()
    measured = ((decoded - v) ** 2).sum(axis=1)
    assert measured.mean() == pytest.approx(total, rel=6 * measured.std() / total / draws**0.5)
    error_of_mean = ((decoded.mean(axis=0) - v) ** 2).sum()
    # The sum of BUCKET nearly independent squares scatters by a few times sqrt(2/BUCKET).
    assert error_of_mean == pytest.approx(total / draws, rel=0.6)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("d", [64, 512, 4096])
def test_l2_variance_stays_within_lemma_3_1(bits, d):
    """w <= min(d / s^2, sqrt(d) / s)."""
    v = gaussian(d)
    s = 2 ** (bits - 1) - 1
    errors = [
        np.sum((round_trip(v, bits, "l2", bucket=d, step=t) - v) ** 2) / np.sum(v**2)
        for t in range(50)
    ]
    assert np.mean(errors) <= min(d / s**2, d**0.5 / s)


@pytest.mark.parametrize(("bits", "s"), [(2, 1), (4, 7), (8, 127)])
def test_l2_sparsity_stays_within_the_bound(bits, s):
    """E|Q|_0 <= s (s + sqrt d); for s = 1 and d = 512 about 18.1."""
    v = gaussian(BUCKET)
    counts = [np.count_nonzero(round_trip(v, bits, "l2", step=t)) for t in range(300)]
    assert np.mean(counts) <= s * (s + BUCKET**0.5)
    if s == 1:
        assert np.mean(counts) == pytest.approx(18.1, abs=1.0)


@pytest.mark.parametrize(
    ("norm", "bits", "w"),
    [("max", 8, 1.1e-4), ("max", 4, 0.036), ("max", 2, 1.6), ("l2", 8, 0.0053), ("l2", 4, 1.58),
     ("l2", 2, 17.0)],
)  # fmt: skip
def test_variance_of_gaussian_buckets_is_the_published_one(norm, bits, w):
    v = gaussian(BUCKET * 400)
    error = np.sum((round_trip(v, bits, norm) - v) ** 2) / np.sum(v**2)
    assert error == pytest.approx(w, rel=0.06)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [1.0, -1.0, 3e38, -3e38, 1e-38, 1e-45, -1e-45])
def test_bucket_maximum_never_wraps(bits, value):
    """Stochastic rounding must not carry the largest code over to the smallest."""
    x = np.full(BUCKET, value, dtype=np.float32)
    for step in range(20):
        decoded = round_trip(x, bits, step=step)
        # A level of the smallest buckets is itself subnormal, so it may round.
        assert np.allclose(decoded, x, rtol=1e-6, atol=1e-43)
        assert (decoded * np.sign(value) >= 0).all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bits", BITS)
def test_zeros_and_constants_divide_by_nothing(bits, norm):
    assert not round_trip(np.zeros(1000), bits, norm).any()
    constant = round_trip(np.full(1000, -2.5), bits, norm)
    assert np.isfinite(constant).all()


@pytest.mark.parametrize("bits", BITS)
def test_exact_levels_come_back_unchanged(bits):
    s = 2 ** (bits - 1) - 1
    x = np.tile(np.arange(-s, s + 1, dtype=np.float32), 200)[: BUCKET * 2]
    assert np.array_equal(round_trip(x, bits), x)


@pytest.mark.parametrize("bits", BITS)
def test_last_partial_bucket_keeps_its_own_norm(bits):
    x = np.concatenate([np.full(BUCKET, 1000.0), np.full(3, 0.001)]).astype(np.float32)
    assert np.allclose(round_trip(x, bits), x, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("norm", NORMS)
def test_non_finite_bucket_decodes_to_nan_and_only_that_bucket(bad, norm):
    x = gaussian(BUCKET * 3)
    x[BUCKET + 17] = bad
    decoded = round_trip(x, norm=norm)
    assert np.isnan(decoded[BUCKET : 2 * BUCKET]).all()
    assert np.isfinite(decoded[:BUCKET]).all()
    assert np.isfinite(decoded[2 * BUCKET :]).all()


def test_l2_norm_beyond_float32_is_not_mistaken_for_nan():
    x = np.full(BUCKET, 3e38, dtype=np.float32)
    assert np.isfinite(round_trip(x, 8, "l2")).all()


def test_same_key_gives_same_bytes_and_each_part_of_the_key_matters():
    x = gaussian(2048)
    key = {"seed": 1, "tensor": 2, "step": 3, "rank": 4}
    base = encode(x, **key).tobytes()
    assert encode(x, **key).tobytes() == base
    for part in key:
        assert encode(x, **{**key, part: key[part] + 1}).tobytes() != base, part


def test_ranks_draw_independent_noise():
    """Errors of p ranks average out like 1/p; shared noise would not."""
    v, p = gaussian(BUCKET * 64), 16
    errors = np.stack([round_trip(v, rank=r) - v for r in range(p)])
    ratio = np.sum(errors.mean(axis=0) ** 2) / np.mean(np.sum(errors**2, axis=1))
    assert ratio == pytest.approx(1 / p, rel=0.1)


@pytest.mark.parametrize("bits", BITS)
def test_message_has_the_size_that_the_format_promises(bits):
    n = 100_000
    buckets = -(-n // BUCKET)
    codes = -(-n // 64) * 8 * bits
    assert encode(gaussian(n), bits).size == HEADER_BYTES + 4 * buckets + codes


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_any_damaged_byte_is_refused(position, flip):
    message = encode(gaussian(700))
    message[position % message.size] ^= flip
    with pytest.raises(HorovodInternalError, match="refused"):
        decode(message, 700)


def test_foreign_and_cut_messages_are_refused():
    message = encode(gaussian(700))
    with pytest.raises(UsageError, match="expected"):
        decode(message[:-1], 700)
    with pytest.raises(HorovodInternalError, match="norm"):
        decode(message, 700, norm="l2")
    with pytest.raises(HorovodInternalError, match="magic"):
        decode(np.zeros_like(message), 700)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [({"bits": 3}, "2, 4 or 8"), ({"bits": 0}, "2, 4 or 8"), ({"bucket": 100}, "multiple of 64"),
     ({"bucket": 0}, "multiple of 64"), ({"norm": "min"}, "known are max, l2")],
)  # fmt: skip
def test_bad_settings_name_the_choices(arguments, remedy):
    with pytest.raises(UsageError, match=remedy):
        encode(gaussian(10), **arguments)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=1200),
    st.sampled_from(BITS),
)
def test_error_of_any_finite_input_stays_below_one_level(values, bits):
    x = np.array(values, dtype=np.float32)
    decoded = round_trip(x, bits).astype(np.float64)
    s = 2 ** (bits - 1) - 1
    for begin in range(0, x.size, BUCKET):
        part = x[begin : begin + BUCKET].astype(np.float64)
        unit = np.abs(part).max() / s
        error = np.abs(decoded[begin : begin + BUCKET] - part).max()
        assert error <= unit * (1 + 1e-5) + 1e-44
