"""Codes that send values: top-k against a sort, casts against numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest

from qsgd_hpc import _core

BUCKET = 512
HALF_MAX = 65504.0
EVERY_HALF = np.arange(1 << 16, dtype=np.uint16)


def gaussian(n, seed=1):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def round_trip(x, **options):
    spec = _core.CodecSpec(**options)
    x = np.asarray(x, dtype=np.float32)
    return _core.decode(_core.encode(x, spec=spec), count=x.size, spec=spec)


def largest(x, k):
    """Zero all but the k largest magnitudes; of equal ones the first stay."""
    kept = np.zeros_like(x)
    places = np.argsort(-np.abs(x), kind="stable")[:k]
    kept[places] = x[places]
    return kept


@pytest.mark.parametrize("k", [1, 5, 511, 512])
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 511, 512, 513, 1300])
def test_topk_keeps_the_largest_of_every_bucket(n, k):
    x = gaussian(n, seed=n)
    expected = [largest(x[at : at + BUCKET], k) for at in range(0, n, BUCKET)]
    decoded = round_trip(x, scheme="topk", k=k)
    assert np.array_equal(decoded, np.concatenate([*expected, np.zeros(0, dtype=np.float32)]))


def test_topk_keeps_the_first_of_equals_and_the_last_place_of_the_largest_bucket():
    x = np.resize(np.array([1, -1], dtype=np.float32), 1 << 16)
    assert np.flatnonzero(round_trip(x, scheme="topk", k=3, bucket_size=1 << 16)).tolist() == [
        0, 1, 2]  # fmt: skip
    x[-1] = -2
    decoded = round_trip(x, scheme="topk", k=1, bucket_size=1 << 16)
    assert np.flatnonzero(decoded).tolist() == [65535]
    assert decoded[-1] == -2


@pytest.mark.parametrize("k", [1, 5, 16, 40, 128, 700])
@pytest.mark.parametrize("bucket", [512, 4096])
@pytest.mark.parametrize("kind", ["few magnitudes", "a few that are not zero", "zeros", "tiny"])
def test_topk_keeps_the_largest_and_the_first_whatever_is_equal(k, bucket, kind):
    x = gaussian(2 * bucket + 300, seed=k)
    if kind == "few magnitudes":
        x = np.round(x)
    elif kind == "a few that are not zero":
        x[np.abs(x) < 2.5] = 0
    elif kind == "zeros":
        x[:] = -0.0
    else:
        x *= np.float32(1e-41)  # subnormal
    k = min(k, bucket)
    expected = [largest(x[at : at + bucket], k) for at in range(0, x.size, bucket)]
    decoded = round_trip(x, scheme="topk", k=k, bucket_size=bucket)
    assert np.array_equal(decoded, np.concatenate(expected))


def test_topk_adds_what_it_keeps_and_nothing_else():
    x, spec = gaussian(1300), _core.CodecSpec(scheme="topk", k=20)
    message = _core.encode(x, spec=spec)
    total = gaussian(1300, seed=2)
    expected = total + _core.decode(message, count=x.size, spec=spec)
    _core.decode_add_into(message, total, spec=spec)
    assert np.array_equal(total, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_topk_lets_a_bad_element_be_seen(bad):
    x = gaussian(BUCKET * 3) * np.float32(1e37)
    x[BUCKET + 500] = bad
    decoded = round_trip(x, scheme="topk", k=1)
    assert np.flatnonzero(~np.isfinite(decoded)).tolist() == [BUCKET + 500]


def test_topk_message_holds_six_bytes_for_each_kept():
    spec = _core.CodecSpec(scheme="topk", k=10)
    assert spec.bytes(BUCKET * 3 + 4) == 6 * (3 * 10 + 4)


def samples():
    """Return floats of every exponent, at and around every rounding boundary of a half."""
    bits = np.random.default_rng(3).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    with np.errstate(invalid="ignore"):
        halves = EVERY_HALF.view(np.float16).astype(np.float32)
    around = [(halves.view(np.uint32) + np.uint32(d)).astype(np.uint32)
              for d in (0, 1, 0x0FFF, 0x1000, 0x1001, 0xFFFFFFFF)]  # fmt: skip
    return np.concatenate([bits, *around]).view(np.float32)


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_float16_equals_numpys_rounding():
    x = samples()
    spec = _core.CodecSpec(scheme="float16")
    codes = _core.encode(x, spec=spec)[32:].view(np.uint16)
    expected = x.astype(np.float16)
    number = ~np.isnan(x)
    assert np.array_equal(codes[number], expected.view(np.uint16)[number])
    assert np.isnan(codes.view(np.float16)[~number]).all()
    decoded = round_trip(x, scheme="float16")
    assert np.array_equal(decoded, expected.astype(np.float32), equal_nan=True)


def test_bfloat16_equals_torchs_rounding():
    torch = pytest.importorskip("torch")
    x = samples()
    decoded = round_trip(x, scheme="bfloat16")
    expected = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    number = ~np.isnan(x)
    assert np.array_equal(decoded[number].view(np.uint32), expected[number].view(np.uint32))
    assert np.isnan(decoded[~number]).all()


@pytest.mark.parametrize("scheme", ["float16", "bfloat16"])
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 511, 513, 1300])
def test_casts_keep_order_signs_and_size(scheme, n):
    x = np.arange(n, dtype=np.float32) % 256 - 128  # exact in eight bits
    assert np.array_equal(round_trip(x, scheme=scheme), x)
    assert _core.CodecSpec(scheme=scheme).bytes(n) == 2 * n


def test_float16_turns_what_it_cannot_hold_into_inf():
    decoded = round_trip([HALF_MAX, 65520.0, -1e30], scheme="float16")
    assert decoded.tolist() == [HALF_MAX, np.inf, -np.inf]
