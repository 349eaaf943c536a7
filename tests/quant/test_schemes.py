"""Every code besides QSGD's own: against its definition, its properties, and bad input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsgd_hpc import _core
from qsgd_hpc.compression import Elias, MinMax, Nuqsgd, Qsgd, Sign, TernGrad, TopK
from qsgd_hpc.errors import UsageError
from tests import reference_schemes

HEADER_BYTES = 32
BUCKET = 512
PACKED = [(scheme, bits) for scheme, d in reference_schemes.DEFINITIONS.items() for bits in d.bits]
KEY = {"seed": (7 << 32) + 5, "tensor": 9, "step": 11, "rank": 3}
FLOAT_MAX = np.finfo(np.float32).max
EDGES = [0, 1, 63, 64, 65, 511, 512, 513, 1300]


def gaussian(n, seed=1):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def spec_of(scheme, **options):
    return _core.CodecSpec(scheme=scheme, **options)


def round_trip(x, spec, **key):
    x = np.asarray(x, dtype=np.float32)
    return _core.decode(_core.encode(x, spec=spec, **key), count=x.size, spec=spec)


def awkward(n):
    """Name buckets at the limits of float32 and of the definitions."""
    x = gaussian(n, seed=n)
    yield "gaussian", x
    yield "equal", np.full(n, -2.5, dtype=np.float32)
    yield "negative", -np.abs(x) - 1
    yield "zeros", np.zeros(n, dtype=np.float32)
    yield "denormal", (x * np.float32(1e-41)).astype(np.float32)
    yield "tiny range", (x * np.float32(1e-37)).astype(np.float32)
    yield "huge", np.clip(x * np.float32(2e38), -FLOAT_MAX, FLOAT_MAX).astype(np.float32)
    yield "mixed", np.where(x > 1, x * np.float32(1e30), x * np.float32(1e-30))


@pytest.mark.parametrize(
    "options",
    [{}, {"rounding": "nearest"}, {"contract": True}, {"norm": "l2"}],
    ids=["default", "nearest", "contract", "l2"],
)
@pytest.mark.parametrize(("scheme", "bits"), PACKED)
@pytest.mark.filterwarnings("ignore:overflow encountered")  # the clip above
def test_message_equals_the_reference_byte_for_byte(scheme, bits, options):
    spec = spec_of(scheme, bits=bits, **options)
    for n in EDGES:
        for name, x in awkward(n):
            message = _core.encode(x, spec=spec, **KEY)
            body = reference_schemes.message_body(
                x, scheme=scheme, bits=bits, bucket=BUCKET, **options, **KEY
            )
            assert message[HEADER_BYTES:].tobytes() == body.tobytes(), (n, name)
            expected = reference_schemes.decode_body(
                body, scheme=scheme, bits=bits, bucket=BUCKET, count=n
            )
            assert np.array_equal(_core.decode(message, count=n, spec=spec), expected), (n, name)
            assert np.isfinite(expected).all(), (n, name)


def grid_of(message, scheme, bits):
    """Return the levels of a one-bucket message, in rising order."""
    scales = message[HEADER_BYTES:][:8].view(np.float32).astype(np.float64)
    if scheme == "minmax":
        return scales[0] + scales[1] * np.arange(2**bits)
    s = 2 ** (bits - 1) - 1
    positive = 2.0 ** np.arange(1 - s, 1) if scheme == "nuqsgd" else np.ones(1)
    return scales[0] * np.concatenate([-positive[::-1], [0.0], positive])


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize(
    ("scheme", "bits"), [("minmax", 1), ("minmax", 3), ("minmax", 8), ("nuqsgd", 2),
                         ("nuqsgd", 4), ("nuqsgd", 8), ("terngrad", 2)]
)  # fmt: skip
def test_decoding_is_unbiased_with_the_exact_variance(scheme, bits, norm):
    """Between levels lo and hi, v has the variance (hi - v)(v - lo); the mean of R draws, 1/R."""
    draws, spec = 400, spec_of(scheme, bits=bits, norm=norm)
    v = np.random.default_rng(4).uniform(-1, 1, BUCKET).astype(np.float32)  # TernGrad clips none
    decoded = np.stack([round_trip(v, spec, step=t) for t in range(draws)]).astype(float)
    grid = grid_of(_core.encode(v, spec=spec), scheme, bits)
    upper = np.clip(np.searchsorted(grid, v), 1, grid.size - 1)
    total = np.maximum((grid[upper] - v) * (v - grid[upper - 1]), 0).sum()
    error = ((decoded - v) ** 2).sum(axis=1)
    assert error.mean() == pytest.approx(total, rel=6 * error.std() / total / draws**0.5)
    # The sum of BUCKET nearly independent squares scatters by a few times sqrt(2/BUCKET).
    assert ((decoded.mean(axis=0) - v) ** 2).sum() == pytest.approx(total / draws, rel=0.6)


@pytest.mark.parametrize(
    ("data", "bits", "w"),
    [("gaussian", 8, 9.5e-5), ("gaussian", 4, 0.028), ("gaussian", 2, 0.69),
     ("student", 8, 3.1e-4), ("student", 4, 0.090), ("student", 2, 2.3)],
)  # fmt: skip
def test_variance_of_minmax_buckets_is_the_published_one(data, bits, w):
    n = BUCKET * 1000
    student = np.random.default_rng(1).standard_t(4, n).astype(np.float32)
    v = gaussian(n) if data == "gaussian" else student
    error = round_trip(v, spec_of("minmax", bits=bits)).astype(float) - v
    # Given to two digits; and the fourth moment of this Student's t is infinite.
    rel = 0.05 if data == "gaussian" else 0.1
    assert np.sum(error**2) / np.sum(v.astype(float) ** 2) == pytest.approx(w, rel=rel)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_minmax_of_a_constant_bucket_divides_by_nothing_and_is_exact(bits, rounding):
    spec = spec_of("minmax", bits=bits, rounding=rounding)
    for value in (0.0, 1.0, -2.5, 3e38, -3e38, 1e-45):
        x = np.full(BUCKET + 3, value, dtype=np.float32)
        assert np.array_equal(round_trip(x, spec), x), value


@pytest.mark.parametrize(("scheme", "bits"), PACKED)
def test_bucket_maximum_never_wraps(scheme, bits):
    """Rounding up must not carry the largest code over to the smallest."""
    spec = spec_of(scheme, bits=bits)
    x = np.linspace(-1, 1, BUCKET).astype(np.float32)
    for step in range(50):
        decoded = round_trip(x, spec, step=step)
        assert decoded[-1] > 0 > decoded[0]
        if scheme != "sign":
            assert decoded[-1] == pytest.approx(1, abs=1e-6)
            assert decoded[0] == pytest.approx(-1, abs=1e-6)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_exact_levels_come_back_unchanged(bits):
    s = 2 ** (bits - 1) - 1
    x = np.resize(np.arange(2**bits, dtype=np.float32) - 3, BUCKET)
    levels = np.concatenate([[0.0], 2.0 ** np.arange(1 - s, 1)]).astype(np.float32)
    y = np.resize(np.concatenate([levels, -levels]), BUCKET)
    for step in range(20):
        assert np.array_equal(round_trip(x, spec_of("minmax", bits=bits), step=step), x)
        assert np.array_equal(round_trip(y, spec_of("nuqsgd", bits=bits), step=step), y)


@pytest.mark.parametrize(("scheme", "bits"), PACKED)
def test_last_partial_bucket_keeps_its_own_scale(scheme, bits):
    x = np.concatenate([np.full(BUCKET, 1000.0), np.full(3, 0.001)]).astype(np.float32)
    assert np.allclose(round_trip(x, spec_of(scheme, bits=bits)), x, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("scheme", "bits"), PACKED)
def test_non_finite_bucket_decodes_to_nan_and_only_that_bucket(scheme, bits, bad):
    x = gaussian(BUCKET * 3)
    x[BUCKET + 17] = bad
    decoded = round_trip(x, spec_of(scheme, bits=bits))
    assert np.array_equal(np.isnan(decoded), np.repeat([False, True, False], BUCKET))


@pytest.mark.parametrize(("scheme", "bits"), [("minmax", 4), ("nuqsgd", 4), ("terngrad", 2)])
def test_same_key_gives_same_bytes_and_each_part_of_the_key_matters(scheme, bits):
    x, spec = gaussian(2048), spec_of(scheme, bits=bits)
    base = _core.encode(x, spec=spec, **KEY).tobytes()
    assert _core.encode(x, spec=spec, **KEY).tobytes() == base
    for part in KEY:
        other = _core.encode(x, spec=spec, **{**KEY, part: KEY[part] + 1}).tobytes()
        assert other[HEADER_BYTES:] != base[HEADER_BYTES:], part


def test_terngrad_clips_at_two_and_a_half_sigma():
    x = np.ones(BUCKET, dtype=np.float32)
    x[0] = 1000
    sigma = np.sqrt((x.astype(float) ** 2).mean())
    assert np.abs(round_trip(x, spec_of("terngrad"))).max() == pytest.approx(2.5 * sigma)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=700),
    st.integers(2, 8),
)
def test_error_of_any_finite_input_stays_below_one_level(values, bits):
    x = np.array(values, dtype=np.float32)
    affine = round_trip(x, spec_of("minmax", bits=bits)).astype(np.float64) - x
    exponential = round_trip(x, spec_of("nuqsgd", bits=bits)).astype(np.float64) - x
    for begin in range(0, x.size, BUCKET):
        part = slice(begin, begin + BUCKET)
        v = x[part].astype(np.float64)
        unit = (v.max() - v.min()) / (2**bits - 1)
        assert np.abs(affine[part]).max() <= unit + 1e-6 * np.abs(v).max() + 1e-44
        least = np.abs(v).max() * 2.0 ** (2 - 2 ** (bits - 1))
        assert (np.abs(exponential[part]) <= np.maximum(np.abs(v), least) * 1.00001 + 1e-44).all()


@pytest.mark.parametrize(
    "code",
    [
        *(kind(bits) for kind in (Qsgd, Nuqsgd, Elias, MinMax) for bits in (1, 2, 4, 8)),
        *(Qsgd(bits, norm="l2") for bits in (1, 2, 4)),
        *(TernGrad(), TopK(ratio=0.01), TopK(ratio=0.9), Sign()),
    ],
    ids=repr,
)
def test_a_zero_stays_zero_but_in_one_bit_and_minmax(code):
    x = gaussian(4 * BUCKET)
    x[::2] = 0
    out = round_trip(x, code.coding().spec)[::2]
    one_bit = code.coding().spec.bits == 1
    assert (not out.any()) == (not one_bit and not isinstance(code, MinMax))
    assert not round_trip(np.zeros(BUCKET), code.coding().spec).any()


def test_biased_codes_say_so():
    unbiased = [{"scheme": "minmax"}, {"scheme": "nuqsgd"}, {}, {"scheme": "bfloat16"}]
    assert not any(_core.CodecSpec(**options).biased for options in unbiased)
    biased = [{"scheme": "sign"}, {"scheme": "topk", "k": 5}, {"rounding": "nearest"},
              {"scheme": "terngrad"}, {"scheme": "nuqsgd", "contract": True}]  # fmt: skip
    assert all(_core.CodecSpec(**options).biased for options in biased)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [({"scheme": "sign", "bits": 4}, "has 1; leave bits out"),
     ({"scheme": "minmax", "bits": 9}, "choose 1 to 8"),
     ({"scheme": "nuqsgd", "bits": 1}, "choose 2 to 8"),
     ({"scheme": "topk"}, "1 to the bucket_size of 512"),
     ({"scheme": "topk", "k": 513}, "k=513"),
     ({"scheme": "minmax", "k": 5}, "only topk"),
     ({"scheme": "float16", "bucket_size": 100}, "multiple of 64"),
     ({"scheme": "tern"}, "known are qsgd, minmax")],
)  # fmt: skip
def test_bad_settings_name_the_choices(options, remedy):
    with pytest.raises(UsageError, match=remedy):
        _core.CodecSpec(**options)
