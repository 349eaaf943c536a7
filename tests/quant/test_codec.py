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
BITS = tuple(range(2, 9))
KEY = {"seed": (7 << 32) + 5, "tensor": 9, "step": 11, "rank": 3}
EDGES = (0, 1, 63, 64, 65, 511, 512, 513, 1300)
NORMS = ("max", "l2")


def encode(x, bits=4, norm="max", bucket=BUCKET, **key):
    spec = _core.CodecSpec(bits=bits, bucket_size=bucket, norm=norm)
    return _core.encode(np.asarray(x, dtype=np.float32), spec=spec, **key)


def decode(message, count, bits=4, norm="max", bucket=BUCKET):
    spec = _core.CodecSpec(bits=bits, bucket_size=bucket, norm=norm)
    return _core.decode(message, count=count, spec=spec)


def round_trip(x, bits=4, norm="max", bucket=BUCKET, **key):
    return decode(encode(x, bits, norm, bucket, **key), len(x), bits, norm, bucket)


def gaussian(n, seed=1):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


@pytest.fixture(params=_core.instruction_sets())
def instruction_set(request):
    _core.use_instruction_set(request.param)
    yield request.param
    _core.use_instruction_set(_core.instruction_sets()[0])


def from_hex(text):
    return np.frombuffer(bytes.fromhex(text), dtype=np.uint8)[None]


def test_reference_aes_round_gives_the_standard_states():
    """FIPS-197, appendix B: the first and the last round of the example cipher."""
    first = reference.aes_round(
        from_hex("193de3bea0f4e22b9ac68d2ae9f84808"), from_hex("a0fafe1788542cb123a339392a6c7605")
    )
    assert first.tobytes().hex() == "a49c7ff2689f352b6b5bea43026a5049"
    last = reference.aes_round(
        from_hex("eb40f21e592e38848ba113e71bc342d2"),
        from_hex("d014f9a8c9ee2589e13f0cc8b6630ca6"),
        last=True,
    )
    assert last.tobytes().hex() == "3925841d02dc09fbdc118597196a0b32"


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [((0, 0), (0, 0), (0x506401EF8D73EE19, 0x0CBE9C0D13C2DBE4)),
     ((0x85A308D3243F6A88, 0x0370734413198A2E), (0x299F31D0A4093822, 0xEC4E6C89082EFA98),
      (0x8357AD74A516E7D6, 0x8763FFF35B59B3EC))],
)  # fmt: skip
def test_reference_ars_gives_the_published_vectors(counter, key, answer):
    """Known answers of the Random123 distribution for ten rounds."""
    got = reference.ars(np.array([counter], dtype=np.uint64), key, 10)[0]
    assert tuple(int(word) for word in got) == answer


@pytest.mark.parametrize("first_tile", [0, 5, 2**33, 2**60 - 1])
def test_noise_equals_the_reference_beyond_any_tensor_size(first_tile, instruction_set):
    core = _core.noise(first_tile=first_tile, tiles=3, **KEY)
    assert np.array_equal(core, reference.noise(3 * 64, first_tile=first_tile, **KEY))


def test_noise_is_uniform_in_every_place_of_a_tile():
    tiles = 20_000
    draws = _core.noise(first_tile=0, tiles=tiles, **KEY).reshape(tiles, 64)
    mean = draws.mean(axis=0) / 65536
    assert np.abs(mean - 0.5).max() < 5 * (1 / 12 / tiles) ** 0.5
    counts = np.bincount(draws.reshape(-1) >> 8, minlength=256)
    expected = draws.size / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5


@pytest.mark.parametrize("contract", [False, True])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bits", BITS)
def test_message_equals_the_reference_byte_for_byte(
    bits, norm, rounding, contract, instruction_set
):
    options = {"bits": bits, "norm": norm, "rounding": rounding, "contract": contract}
    spec = _core.CodecSpec(**options)
    for n in EDGES:
        x = gaussian(n, seed=n)
        message = _core.encode(x, spec=spec, **KEY)
        scales, codes = reference.quantise(x, bucket=BUCKET, **options, **KEY)
        body = np.concatenate([scales.view(np.uint8), reference.pack(codes, bits)])
        assert message[HEADER_BYTES:].tobytes() == body.tobytes(), n
        expected = reference.dequantise(scales, codes, bits=bits, bucket=BUCKET, count=n)
        assert np.array_equal(_core.decode(message, count=n, spec=spec), expected), n
        total = gaussian(n, seed=n + 1)
        wanted = total + expected
        _core.decode_add_into(message, total, spec=spec)
        assert np.array_equal(total, wanted), n


@pytest.mark.parametrize("value", [1e-38, 3e-33, 1e-45, 2e-39, 3e38])
@pytest.mark.parametrize("bits", [2, 5, 8])
def test_smallest_and_largest_norms_equal_the_reference(bits, value, instruction_set):
    x = gaussian(700) / np.float32(4)
    x = (x / np.abs(x).max() * value).astype(np.float32)
    spec = _core.CodecSpec(bits=bits)
    scales, codes = reference.quantise(x, bits=bits, bucket=BUCKET, norm="max", **KEY)
    body = np.concatenate([scales.view(np.uint8), reference.pack(codes, bits)])
    message = _core.encode(x, spec=spec, **KEY)
    assert message[HEADER_BYTES:].tobytes() == body.tobytes()
    levels = 2 ** (bits - 1) - 1
    exact = (codes[:700].astype(float) - levels) * np.repeat(scales, BUCKET)[:700] / levels
    assert np.allclose(_core.decode(message, count=700, spec=spec), exact, rtol=1e-6, atol=1e-45)


def test_golden_messages_never_change(instruction_set):
    """The bytes of two messages, so that a new version cannot silently change the format."""
    x = np.linspace(-1, 1, 65)
    key = {"seed": 1, "tensor": 2, "step": 3, "rank": 4, "bucket": 64}
    assert encode(x, bits=2, **key).tobytes().hex() == GOLDEN_2
    assert encode(x, bits=3, norm="l2", **key).tobytes().hex() == GOLDEN_3


GOLDEN_2 = (
    "515347440200020040000000000000004100000000000000b550cdcbce55b60b0000803f0000803f"
    "54946090545495649495a4a5959594a456555555555555555555555555555555"
)
GOLDEN_3 = (
    "515347440200030140000000000000004100000000000000e18f335fc0ae092577d693400000803f"
    "55955595555595659595a595959595557e3e5b3a7e7f3def57555555555555555555555555555555"
    "feffffffffffffff"
)


@pytest.mark.parametrize("bits", [3, 8])
def test_any_number_of_threads_gives_the_same_message(bits):
    """Enough elements for several ranges, and for the path past the caches."""
    n = 5_000_011
    x = gaussian(n)
    spec = _core.CodecSpec(bits=bits)
    message = _core.encode(x, spec=spec, **KEY)
    expected = _core.decode(message, count=n, spec=spec)
    for threads in (1, 2, 3):
        again = np.empty_like(message)
        assert _core.encode_into(x, again, spec=spec, threads=threads, **KEY)
        assert np.array_equal(again, message), threads
        y = np.empty_like(x)
        _core.decode_into(message, y, spec=spec, threads=threads)
        assert np.array_equal(y, expected), threads
        y[:] = 1
        _core.decode_add_into(message, y, spec=spec, threads=threads)
        assert np.array_equal(y, 1 + expected), threads


def as_type(x, dtype):
    """Return elements of this type as `_core` takes them, and their float32 values."""
    if dtype == "bfloat16":
        source = (x.view(np.uint32) >> 16).astype(np.uint16)
        return source, (source.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        source = x.astype(dtype)
        return source, source.astype(np.float32)


def rounded(values, dtype):
    """Return float32 as this type: rounded to nearest, ties to even, Inf beyond its range."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    bits = values.view(np.uint32).astype(np.uint64)
    short = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), (bits >> 16 | 0x40).astype(np.uint16), short)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("bucket", [64, 512, 8192])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_types_are_coded_as_their_float32_values(dtype, bucket, bits, instruction_set):
    for n in (*EDGES, 10_000):
        source, x = as_type(gaussian(n), dtype)
        spec = _core.CodecSpec(bits=bits, bucket_size=bucket)
        message = _core.encode(x, spec=spec, **KEY)
        other = _core.encode(source, spec=spec, dtype=dtype, **KEY)
        assert np.array_equal(message, other), n
        y = np.empty_like(source)
        _core.decode_into(message, y, spec=spec, dtype=dtype)
        assert np.array_equal(y, rounded(_core.decode(message, count=n, spec=spec), dtype)), n


# Norms that the loops for ordinary buckets leave to others, or must round with care.
UNUSUAL = (0.0, 1e-45, 3e-39, 1e-30, 6e-8, 65503.0, 65504.0, 65519.0, 65520.0, 1e30, 3.4e38)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bits", [2, 4, 7, 8])
def test_buckets_of_any_norm_stand_side_by_side(bits, dtype, instruction_set):
    """Runs of ordinary buckets begin and end anywhere; each bucket is coded as it is by itself."""
    norms = np.array([v for unusual in UNUSUAL for v in (1.0, unusual, unusual, 2.0, 3.0)])
    x = gaussian(BUCKET * len(norms)).reshape(-1, BUCKET)
    x = (x / np.abs(x).max(axis=1, keepdims=True) * norms[:, None]).astype(np.float32)
    x[7, 5], x[9, 6], x[20, 511] = np.nan, np.inf, -np.inf
    source, values = as_type(x.ravel(), dtype)
    spec = _core.CodecSpec(bits=bits)
    message = _core.encode(source, spec=spec, dtype=dtype, **KEY)
    infinite = ~np.isfinite(values.reshape(-1, BUCKET)).all(axis=1)
    known = np.where(np.repeat(infinite, BUCKET), 0, values)
    scales, codes = reference.quantise(known, bits=bits, bucket=BUCKET, norm="max", **KEY)
    scales[infinite] = np.nan  # with the codes of zeros
    body = np.concatenate([scales.view(np.uint8), reference.pack(codes, bits)])
    assert message[HEADER_BYTES:].tobytes() == body.tobytes()
    y = np.empty_like(source)
    _core.decode_into(message, y, spec=spec, dtype=dtype)
    wanted = _core.decode(message, count=len(values), spec=spec)
    assert np.array_equal(y, rounded(wanted, dtype), equal_nan=y.dtype.kind == "f")


def edges_of_casts():
    """Return float32 of every kind, around every float16 and between."""
    with np.errstate(all="ignore"):
        halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
        bits = halves.view(np.uint32)[:, None] + np.array([-4097, -4096, -1, 0, 1, 4095, 4096])
        near = (bits & 0xFFFFFFFF).astype(np.uint32).view(np.float32).ravel()
    any_bits = np.random.default_rng(2).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    return np.concatenate([near, any_bits.view(np.float32), np.array(UNUSUAL, dtype=np.float32)])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_casts_round_as_numpy_does(dtype, instruction_set):
    x = edges_of_casts()
    spec = _core.CodecSpec(scheme=dtype)
    message = np.zeros(HEADER_BYTES + spec.bytes(x.size), dtype=np.uint8)
    assert not _core.encode_into(x, message, spec=spec)  # there are NaN and Inf among them
    codes = message[HEADER_BYTES:].view(np.uint16)[: x.size]
    with np.errstate(all="ignore"):
        wanted = rounded(x, dtype).view(np.uint16)
    numbers = ~np.isnan(x)
    assert np.array_equal(codes[numbers], wanted[numbers])
    back = _core.decode(message, count=x.size, spec=spec)
    values = (
        codes.view(np.float16).astype(np.float32)
        if dtype == "float16"
        else (codes.astype(np.uint32) << 16).view(np.float32)
    )
    assert np.isnan(back[~numbers]).all()
    assert np.array_equal(back[numbers], values[numbers])


def test_types_that_are_not_floating_are_refused():
    with pytest.raises(UsageError, match="int32 elements cannot be coded"):
        _core.encode(np.zeros(5, dtype=np.int32), spec=_core.CodecSpec())


def test_encoding_tells_whether_all_elements_were_finite():
    x = gaussian(2000)
    spec = _core.CodecSpec()
    message = np.empty(HEADER_BYTES + spec.bytes(x.size), dtype=np.uint8)
    assert _core.encode_into(x, message, spec=spec)
    x[1999] = np.nan
    assert not _core.encode_into(x, message, spec=spec)
    doubles = np.full(2000, 1e300)  # no float32
    assert not _core.encode_into(doubles, message, spec=spec)


@pytest.mark.parametrize("bits", BITS)
def test_nearest_rounding_is_symmetric_and_within_half_a_level(bits):
    x = gaussian(5000)
    spec = _core.CodecSpec(bits=bits, rounding="nearest")
    there = _core.decode(_core.encode(x, spec=spec), count=x.size, spec=spec)
    back = _core.decode(_core.encode(-x, spec=spec), count=x.size, spec=spec)
    assert np.array_equal(there, -back)
    for begin in range(0, x.size, BUCKET):
        part = slice(begin, begin + BUCKET)
        unit = np.abs(x[part]).max() / (2 ** (bits - 1) - 1)
        assert np.abs(there[part] - x[part]).max() <= unit * (0.5 + 2**-15)


@pytest.mark.parametrize(("bits", "norm", "bucket"), [(2, "l2", 512), (2, "max", 512),
                                                      (3, "l2", 4096)])  # fmt: skip
def test_contract_makes_the_code_a_contraction(bits, norm, bucket):
    """E |Q/(1+w) - v|^2 = w/(1+w) |v|^2, below |v|^2; without it the error is w > 1 times that."""
    v = gaussian(bucket)
    energy = np.sum(v.astype(float) ** 2)

    def error(contract):
        spec = _core.CodecSpec(bits=bits, norm=norm, bucket_size=bucket, contract=contract)
        draws = (_core.encode(v, spec=spec, step=t) for t in range(200))
        decoded = (_core.decode(m, count=bucket, spec=spec) for m in draws)
        return np.mean([np.sum((q - v.astype(float)) ** 2) for q in decoded]) / energy

    w = error(contract=False)
    assert w > 1
    assert error(contract=True) == pytest.approx(w / (1 + w), rel=0.1)


def test_contract_leaves_buckets_of_small_variance_alone():
    x = gaussian(4096)
    plain, contracted = (_core.CodecSpec(bits=8, contract=c) for c in (False, True))
    assert np.array_equal(_core.encode(x, spec=plain), _core.encode(x, spec=contracted))


def test_unknown_instruction_set_names_those_of_this_machine():
    with pytest.raises(UsageError, match=r"this machine has .*scalar"):
        _core.use_instruction_set("mmx")


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 63, 64, 65, 1000, 10_000])
def test_scan_and_sum_of_arrays(n, instruction_set):
    x, y = gaussian(n), gaussian(n, seed=2)
    assert _core.max_abs(x) == (np.abs(x).max() if n else 0)
    wanted = y + x
    _core.add_into(y, x)
    assert np.array_equal(y, wanted)
    if n:
        x[n // 2] = np.nan
        assert np.isnan(_core.max_abs(x))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bits", BITS)
def test_decoding_is_unbiased_with_the_exact_variance(bits, norm):
    """Over R draws the squared error of the mean is w/R, and w is (N/s)^2 sum f(1-f) / |v|^2."""
    draws = 300
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
    [({"bits": 9}, "2 to 8"), ({"bits": 1}, "2 to 8"), ({"bits": 0}, "2 to 8"),
     ({"bucket": 100}, "multiple of 64"),
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
