"""EDEN's code: against its formulae, without bias on any bucket, and at the ends of float32."""

from __future__ import annotations

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.compression import Eden
from qsgd_hpc.errors import UsageError
from tests import reference_eden

HEADER = 32
BUCKET = 512
BITS = range(1, 9)
# 1 / (1 - D) - 1, D being the distortion of the Lloyd-Max quantiser.
W = {1: 0.571, 2: 0.133, 3: 0.0358, 4: 0.00959, 5: 0.00251, 6: 6.45e-4, 7: 1.635e-4, 8: 4.12e-5}
DRAWS = 256
KEY = {"seed": (7 << 32) + 5, "tensor": 9, "step": 11, "rank": 3}
FLOAT_MAX = np.finfo(np.float32).max


def spec_of(bits, bucket=BUCKET):
    return _core.CodecSpec(scheme="eden", bits=bits, bucket_size=bucket)


def round_trip(x, spec, **key):
    return _core.decode(_core.encode(x, spec=spec, **key), count=x.size, spec=spec)


def normal(count, seed=1):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


@pytest.fixture(params=_core.instruction_sets())
def _instruction_set(request):
    _core.use_instruction_set(request.param)
    yield
    _core.use_instruction_set(_core.instruction_sets()[0])


def awkward(n):
    """Name buckets at the limits of float32 and of the definition."""
    x = normal(n, seed=n)
    yield "normal", x
    yield "equal", np.full(n, -2.5, dtype=np.float32)
    yield "zeros", np.zeros(n, dtype=np.float32)
    yield "denormal", x * np.float32(1e-41)
    yield "least", x * np.float32(1.5e-33)
    yield "huge", (np.clip(x, -1, 1) * FLOAT_MAX).astype(np.float32)
    yield "spikes", np.where(x > 1.5, x * np.float32(1e30), x * np.float32(1e-30))


@pytest.mark.usefixtures("_instruction_set")
@pytest.mark.parametrize(
    ("bits", "bucket", "counts"),
    [*((bits, 512, (0, 511, 512, 600, 1300)) for bits in BITS),
     (3, 64, (1, 63, 64, 65)), (8, 64, (200,)), (2, 128, (129, 1000)), (5, 8192, (9000,))],
)  # fmt: skip
def test_message_equals_the_reference_byte_for_byte(bits, bucket, counts):
    spec = spec_of(bits, bucket)
    for n in counts:
        for name, x in awkward(n):
            message = _core.encode(x, spec=spec, **KEY)
            body = reference_eden.message_body(x, bits=bits, bucket=bucket, **KEY)
            assert message[HEADER:].tobytes() == body.tobytes(), (n, name)
            expected = reference_eden.decode_body(body, bits=bits, bucket=bucket, count=n)
            assert np.array_equal(_core.decode(message, count=n, spec=spec), expected), (n, name)
            assert np.isfinite(expected).all(), (n, name)
            total = np.ones(n, dtype=np.float32)
            _core.decode_add_into(message, total, spec=spec)
            with np.errstate(over="ignore"):
                assert np.array_equal(total, np.float32(1) + expected), (n, name)


def test_the_largest_bucket_equals_the_reference():
    x, spec = normal(1 << 16), spec_of(3, 1 << 16)
    body = reference_eden.message_body(x, bits=3, bucket=1 << 16, **KEY)
    message = _core.encode(x, spec=spec, **KEY)
    assert message[HEADER:].tobytes() == body.tobytes()
    expected = reference_eden.decode_body(body, bits=3, bucket=1 << 16, count=1 << 16)
    assert np.array_equal(_core.decode(message, count=x.size, spec=spec), expected)


@pytest.mark.parametrize("bits", BITS)
def test_each_level_is_the_mean_of_what_it_stands_for(bits):
    """By a million draws of N(0, 1), whose distortion then gives w."""
    levels, edges = reference_eden.levels_of(bits), reference_eden.edges_of(bits)
    z = np.abs(normal(1 << 20).astype(float))
    code = np.searchsorted(edges, z)
    distortion = ((levels[code] - z) ** 2).mean()
    assert 1 / (1 - distortion) - 1 == pytest.approx(W[bits], rel=0.02)
    gaps = np.append(edges, 6)[code] - np.insert(edges, 0, 0)[code]
    for level in range(levels.size):
        mine = code == level
        if mine.sum() > 100:
            slack = 4 * gaps[mine].mean() / mine.sum() ** 0.5
            assert z[mine].mean() == pytest.approx(levels[level], abs=slack)


BUCKETS = {
    "normal": lambda rng: rng.standard_normal(BUCKET),
    "t4": lambda rng: rng.standard_t(4, BUCKET),
    "t2.5": lambda rng: rng.standard_t(2.5, BUCKET),
    "spike": lambda rng: np.eye(1, BUCKET, 17).ravel() * -3,
    "spikes": lambda rng: rng.standard_normal(BUCKET) * (rng.random(BUCKET) < 0.01),
    "equal": lambda rng: np.full(BUCKET, 0.7),
}


def errors(x, decoded):
    """Return the mean of the draws' errors, and the error of their mean times their number: equal
    where the draws err independently of each other."""
    energy = np.sum(x.astype(float) ** 2)
    each = np.sum((decoded.astype(float) - x) ** 2, axis=1).mean() / energy
    mean = np.sum((decoded.astype(float).mean(axis=0) - x) ** 2) / energy
    return each, mean * len(decoded)


# The two are sums of squares of 512 numbers: their ratio scatters by sqrt(2 / 512) = 0.06. Seeds
# come again: among 2^15, 256 draws add 256 / 2^15 = 0.008.
INDEPENDENT = {"rel": 6 * 0.0625}


@pytest.mark.parametrize("shape", BUCKETS)
@pytest.mark.parametrize("bits", BITS)
def test_decoding_is_unbiased_with_the_error_of_its_levels(bits, shape):
    x = BUCKETS[shape](np.random.default_rng(3)).astype(np.float32)
    spec = spec_of(bits)
    w, mean = errors(x, np.stack([round_trip(x, spec, step=t, tensor=5) for t in range(DRAWS)]))
    # Of a single spike both rotations make multiples of 2 / sqrt(512), not a normal distribution.
    assert w == pytest.approx(W[bits], rel=0.3 if shape == "spike" else 0.08)
    assert mean == pytest.approx(w, **INDEPENDENT)


@pytest.mark.parametrize(("rotations", "unbiased"), [(2, True), (1, False)])
def test_one_rotation_would_not_do(rotations, unbiased):
    """A few large elements become few magnitudes, which err alike whatever the signs."""
    x = BUCKETS["spikes"](np.random.default_rng(3)).astype(np.float32)
    decoded = []
    for seed in np.random.default_rng(4).integers(1 << 15, size=DRAWS):
        scale, codes = reference_eden.encode_bucket(x, 2, int(seed), rotations)
        decoded.append(reference_eden.decode_bucket(scale, codes, 2, rotations))
    w, mean = errors(x, np.stack(decoded))
    assert (mean == pytest.approx(w, **INDEPENDENT)) == unbiased
    assert (mean > 3 * w) != unbiased


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_ranks_err_independently(bits):
    """The mean over 64 ranks that code the same gradient errs by a 64th."""
    x, spec = normal(BUCKET * 16), spec_of(bits)
    w, mean = errors(x, np.stack([round_trip(x, spec, rank=rank) for rank in range(64)]))
    assert mean == pytest.approx(w, rel=0.1)


def test_same_key_gives_same_bytes_and_each_part_of_the_key_matters():
    x, spec = normal(2048), spec_of(3)
    base = _core.encode(x, spec=spec, **KEY).tobytes()
    assert _core.encode(x, spec=spec, **KEY).tobytes() == base
    for part in KEY:
        other = _core.encode(x, spec=spec, **{**KEY, part: KEY[part] + 1}).tobytes()
        assert other[HEADER:] != base[HEADER:], part
    assert _core.encode(x, spec=spec, generator="philox", **KEY).tobytes() == base


def test_equal_buckets_are_rotated_differently():
    x = np.tile(normal(BUCKET), 8)
    decoded = round_trip(x, spec_of(2)).reshape(8, BUCKET)
    assert len(np.unique(decoded, axis=0)) == 8


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_non_finite_bucket_decodes_to_nan_and_only_that_bucket(bits, bad):
    x = normal(BUCKET * 3)
    x[BUCKET + 17] = bad
    decoded = round_trip(x, spec_of(bits))
    assert np.array_equal(np.isnan(decoded), np.repeat([False, True, False], BUCKET))


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 129, 511, 512, 513, 800, 5000])
def test_a_short_bucket_takes_the_bytes_of_the_next_power_of_two(count):
    rest = count % BUCKET
    elements = count - rest + (max(64, 1 << (rest - 1).bit_length()) if rest else 0)
    for bits in BITS:
        assert spec_of(bits).bytes(count) == -(-count // BUCKET) * 4 + elements * bits // 8


@pytest.mark.parametrize("size", [96 * 2, 320, 448])
def test_buckets_must_be_powers_of_two(size):
    with pytest.raises(UsageError, match=r"bucket_size=.*power of two"):
        spec_of(4, size)
    with pytest.raises(UsageError, match=r"bucket_size=.*power of two"):
        Eden(bucket_size=size)


def test_it_is_unbiased_and_needs_feedback_at_one_bit_only():
    assert not any(spec_of(bits).biased for bits in BITS)
    assert [Eden(bits).feeds_back for bits in BITS] == [True] + [False] * 7
    assert [Eden(bits).coding().spec.bits for bits in BITS] == list(BITS)
    assert "eden" in repr(Eden(1).coding().spec)
