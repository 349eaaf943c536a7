"""The GPU kernels write and read the bytes that the definition asks for, lane by lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from qsgd_hpc import _core
from tests import reference
from tests.gpu.twin import KEY, Bytes, Code, Kernels, Part

BITS = range(2, 9)
EDGES = (1, 63, 64, 65, 511, 512, 513, 1300)
# One warp for several buckets, for one, and a block of 2, 3 and 32 warps, the last in two turns.
BUCKETS = (64, 128, 192, 256, 512, 576, 1024, 1536, 32768)


def gaussian(count: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def expected(x: NDArray[np.float32], code: Code, **key: int) -> Bytes:
    """Return the message by the definition: scales, then codes."""
    scales, codes = reference.quantise(
        x, bits=code.bits, bucket=code.bucket, norm=code.norm, rounding=code.rounding,
        contract=code.contract, generator="philox", **{**KEY, **key},
    )  # fmt: skip
    return np.concatenate([scales.view(np.uint8), reference.pack(codes, code.bits)])


def scales_of(message: Bytes, code: Code, count: int) -> NDArray[np.float32]:
    return message[: code.scale_bytes(count)].view(np.float32)


assert_same = np.testing.assert_array_equal


@pytest.mark.parametrize(
    ("rounds", "counter", "key", "output"),
    [
        (7, "00000000" * 4, "00000000" * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, "ffffffff" * 4, "ffffffff" * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (7, "243f6a8885a308d313198a2e03707344", "a4093822299f31d0",
         "4dfccaba 190a87f0 c47362ba b6b5242a"),
        (10, "00000000" * 4, "00000000" * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ],
)  # fmt: skip
def test_reference_philox_gives_the_published_vectors(rounds, counter, key, output):
    """Those that come with the authors' Random123."""
    words = np.frombuffer(bytes.fromhex(counter), dtype=">u4").astype(np.uint32)
    keys = np.frombuffer(bytes.fromhex(key), dtype=">u4")
    got = reference.philox(words[None], (int(keys[0]), int(keys[1])), rounds)
    assert " ".join(f"{word:08x}" for word in got[0]) == output


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_core_and_kernels_write_the_same_bytes(kernels: Kernels, bits, norm):
    """With the generator that both have; the core's message has a header before it."""
    x = gaussian(1300)
    spec = _core.CodecSpec(bits=bits, norm=norm)
    message = _core.encode(x, spec=spec, generator="philox", **KEY)
    assert_same(kernels.encode(x, Code(bits, norm)), message[32:])
    out = np.empty_like(x)
    kernels.decode(message[32:].copy(), out, Code(bits, norm))
    assert_same(out, _core.decode(message, count=x.size, spec=spec))


def test_golden_bytes(kernels: Kernels):
    """What travels between versions, and between CPU and GPU, must not change unnoticed."""
    x, code = np.linspace(-1, 1, 64, dtype=np.float32), Code(3, bucket=64)
    assert kernels.encode(x, code).tobytes().hex() == (
        "0000803f90a49490a0a4a4a4a4e4e4e4e4e5e4e59e0252564e694248"
    )


def test_the_core_draws_what_the_definition_says():
    got = _core.noise(first_tile=7, tiles=3, generator="philox", **KEY)
    assert_same(got, reference.noise(192, first_tile=7, generator="philox", **KEY))


@pytest.mark.parametrize("count", EDGES)
@pytest.mark.parametrize("bits", BITS)
def test_every_width_writes_the_bytes_of_the_definition(kernels: Kernels, bits, count):
    x, code = gaussian(count), Code(bits)
    assert_same(kernels.encode(x, code), expected(x, code))


@pytest.mark.parametrize("contract", [False, True])
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bucket", BUCKETS)
def test_every_bucket_and_norm(kernels: Kernels, bucket, norm, contract):
    x, code = gaussian(2 * bucket + 100), Code(2, norm, bucket=bucket, contract=contract)
    assert_same(kernels.encode(x, code), expected(x, code))


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_rounding_to_the_nearest_level(kernels: Kernels, norm):
    x, code = gaussian(1300), Code(4, norm, "nearest")
    x[:8] = [0.5, -0.5, 1.5, -1.5, 0, -0.0, 7, -7]
    assert_same(kernels.encode(x, code), expected(x, code))


def test_a_part_of_a_tensor_is_coded_as_it_is_in_the_whole(kernels: Kernels):
    x, code = gaussian(4096), Code(5)
    whole, part = kernels.encode(x, code), kernels.encode(x, code, [Part(3072, 1024, 1024)])
    assert_same(part[code.scale_bytes(3072) :], whole[code.scale_bytes(4096) + 1024 // 8 * 5 :])


@pytest.mark.parametrize("bucket", [64, 512, 1024])
def test_many_tensors_in_one_launch(kernels: Kernels, bucket):
    """Each as it would be by itself, wherever it lies in the array and in the message."""
    code, rng = Code(3, bucket=bucket), np.random.default_rng(5)
    counts = [1, 700, 64, 1, 2048, 333, 5]
    x = gaussian(sum(counts) + 40)
    parts, at, message_at = [], 0, 32
    for tensor, count in enumerate(counts):
        at += int(rng.integers(0, 4))
        parts.append(Part(count, at, bucket * tensor, tensor, message_at))
        at += count
        message_at += code.bytes(count)
    message = kernels.encode(x, code, parts)
    out = np.full_like(x, 9)
    kernels.decode(message, out, code, parts)
    written = np.zeros(x.size, dtype=bool)
    for part in parts:
        mine = slice(part.at, part.at + part.count)
        wanted = expected(x[mine], code, tensor=part.tensor, first_tile=part.first // 64)
        assert_same(message[part.message_at :][: wanted.size], wanted)
        alone = np.empty(part.count, dtype=np.float32)
        kernels.decode(wanted, alone, code)
        assert_same(out[mine], alone)
        written[mine] = True
    assert (out[~written] == 9).all()


def test_a_step_can_be_counted_on_the_device(kernels: Kernels):
    """So that a captured graph rounds anew each time it is replayed."""
    x, code = gaussian(700), Code(2)
    assert_same(kernels.encode(x, code, later=5), expected(x, code, step=KEY["step"] + 5))


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_arrays_that_are_not_aligned(kernels: Kernels, offset):
    """A slice of a tensor begins anywhere, so not every four elements come at once."""
    x, code = gaussian(1300 + offset), Code(4)
    message = kernels.encode(x[offset:], code)
    assert_same(message, expected(x[offset:], code))
    out = np.full(1301 + offset, 9, dtype=np.float32)
    kernels.decode(message, out[offset:-1], code)
    aligned = np.empty(1300, dtype=np.float32)
    kernels.decode(message, aligned, code)
    np.testing.assert_array_equal(out[offset:-1], aligned)
    assert out[-1] == 9  # nothing is written behind the end


@pytest.mark.parametrize("bits", BITS)
def test_ends_and_ties(kernels: Kernels, bits):
    """A level is 1: the largest elements, and those between two fixed-point numbers."""
    levels, rng = 2 ** (bits - 1) - 1, np.random.default_rng(1)
    x = rng.integers(0, levels, 512) + (rng.integers(0, 65536, 512) + 0.5) / 65536
    x = (x * rng.choice([-1, 1], 512)).astype(np.float32)
    x[:2] = levels, -levels
    assert_same(kernels.encode(x, Code(bits)), expected(x, Code(bits)))


@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-36, 3e38])
@pytest.mark.parametrize(("norm", "bits"), [("max", 8), ("max", 7), ("l2", 8)])
def test_where_float32_ends(kernels: Kernels, norm, bits, scale):
    x, code = (gaussian(700) / 5 * np.float32(scale)).astype(np.float32), Code(bits, norm)
    message = kernels.encode(x, code)
    assert_same(message, expected(x, code))
    out = np.empty_like(x)
    kernels.decode(message, out, code)
    levels = 2 ** (bits - 1) - 1
    wide = scales_of(message, code, x.size).astype(np.float64).repeat(512)[: x.size] / levels
    np.testing.assert_allclose(out, x, rtol=0, atol=wide.max())
    assert not kernels.nonfinite[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bucket", [128, 512, 1024])
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_what_is_not_finite_is_reported_and_spoils_its_bucket_alone(
    kernels: Kernels, norm, bucket, bad
):
    x, code = gaussian(4 * bucket), Code(4, norm, bucket=bucket)
    x[bucket + 7] = bad
    message = kernels.encode(x, code)
    assert kernels.nonfinite[0] == 1
    assert np.isnan(scales_of(message, code, x.size)).tolist() == [False, True, False, False]
    out = np.empty_like(x)
    kernels.decode(message, out, code)
    assert kernels.nonfinite[0] == 1
    spoilt = ~np.isfinite(out)
    assert spoilt[bucket : 2 * bucket].all() and spoilt.sum() == bucket


def test_a_bucket_of_zeros(kernels: Kernels):
    x, code = np.zeros(600, dtype=np.float32), Code(3, "l2", contract=True)
    message = kernels.encode(x, code)
    out = np.ones_like(x)
    kernels.decode(message, out, code)
    assert not scales_of(message, code, x.size).any() and not out.any() and not kernels.nonfinite[0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", EDGES)
def test_decoding_gives_the_values_of_the_codes(kernels: Kernels, count, bits):
    code = Code(bits, bucket=128)
    scales, codes = reference.quantise(
        gaussian(count), bits=bits, bucket=128, norm="max", **KEY
    )  # the CPU's noise: either side decodes the other's codes
    message = np.concatenate([scales.view(np.uint8), reference.pack(codes, bits)])
    wanted = reference.dequantise(scales, codes, bits=bits, bucket=128, count=count)
    out = np.empty(count, dtype=np.float32)
    kernels.decode(message, out, code)
    np.testing.assert_array_equal(out, wanted)
    own = gaussian(count, seed=2)
    np.testing.assert_array_equal(kernels.sum(message[None], -1, own, code), 0 + wanted)
    both = np.stack([message, message])
    np.testing.assert_array_equal(kernels.sum(both, 0, own, code), own + wanted)


@pytest.mark.parametrize("bits", BITS)
def test_units_are_norms_divided_by_levels(kernels: Kernels, bits):
    """Bit by bit, though the kernels multiply."""
    count, rng, code = 1 << 13, np.random.default_rng(bits), Code(bits, bucket=64)
    scales = rng.uniform(1, 2, count // 64) * 2.0 ** rng.integers(-117, 126, count // 64)
    scales = scales.astype(np.float32)
    codes = rng.integers(0, 2**bits - 1, count).astype(np.uint8)
    message = np.concatenate([scales.view(np.uint8), reference.pack(codes, bits)])
    out = np.empty(count, dtype=np.float32)
    kernels.decode(message, out, code)
    wanted = reference.dequantise(scales, codes, bits=bits, bucket=64, count=count)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_floats(kernels: Kernels, dtype):
    x, code = gaussian(1300).astype(dtype), Code(6)
    message = kernels.encode(x, code)
    assert_same(message, expected(x.astype(np.float32), code))
    out, plain = np.empty_like(x), np.empty(x.size, dtype=np.float32)
    kernels.decode(message, out, code)
    kernels.decode(message, plain, code)
    np.testing.assert_array_equal(out, plain.astype(dtype))


def test_bfloat16(kernels: Kernels):
    x = (gaussian(1300).view(np.uint32) >> 16).astype(np.uint16)
    floats = (x.astype(np.uint32) << 16).view(np.float32)
    code = Code(4)
    message = kernels.encode(x, code, dtype="bfloat16")
    assert_same(message, expected(floats, code))
    out, plain = np.empty_like(x), np.empty(x.size, dtype=np.float32)
    kernels.decode(message, out, code, dtype="bfloat16")
    kernels.decode(message, plain, code)
    bits = plain.view(np.uint32)
    np.testing.assert_array_equal(out, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bucket", [64, 512, 1024])
@pytest.mark.parametrize("own", [0, 1, 3])
def test_the_fused_kernel_is_decode_sum_and_encode(kernels: Kernels, own, bucket, norm):
    ranks, count, code = 4, 2 * bucket + 37, Code(4, norm, bucket=bucket)
    inputs = [gaussian(count, seed=rank) for rank in range(ranks)]
    rows, total = [], np.zeros(count, dtype=np.float32)
    for rank, x in enumerate(inputs):
        rows.append(kernels.encode(x, code, rank=rank))
        value = x if rank == own else np.empty_like(x)
        if rank != own:
            kernels.decode(rows[rank], value, code)
        total = value if rank == 0 else total + value
    rows[own][:] = 0xFF  # nobody reads what the owner would have sent to itself
    factor = np.float32(1 / ranks)
    got = kernels.sum_encode(np.stack(rows), own, inputs[own], code, factor=float(factor))
    assert_same(got, expected(total * factor, code, phase=2))
    assert not kernels.nonfinite[0]
    alone = kernels.sum(np.stack(rows), own, inputs[own], code, factor=float(factor))
    assert_same(alone, total * factor)


def test_the_sum_of_many_tensors_has_the_type_of_the_elements(kernels: Kernels):
    """And lies where the elements do; nothing else is written."""
    code, parts, message_at = Code(4, bucket=64), [], 32
    for tensor, (at, count) in enumerate([(3, 700), (703, 1), (710, 65)]):
        parts.append(Part(count, at, 0, tensor, message_at))
        message_at += code.bytes(count)
    x = gaussian(780).astype(np.float16)
    message = kernels.encode(gaussian(780, seed=2).astype(np.float16), code, parts)
    value = np.zeros(780, dtype=np.float32)
    kernels.decode(message, value, code, parts)
    got = kernels.sum(np.stack([message, message]), 1, x, code, parts, factor=0.5)
    wanted = x.copy()
    for part in parts:
        mine = slice(part.at, part.at + part.count)
        wanted[mine] = ((value[mine] + x[mine]) * np.float32(0.5)).astype(np.float16)
    assert_same(got, wanted)


@pytest.mark.parametrize("contract", [False, True])
@pytest.mark.parametrize("bucket", [64, 192, 512, 1024])
def test_error_feedback_keeps_what_a_code_has_lost(kernels: Kernels, bucket, contract):
    x, code = gaussian(2 * bucket + 37), Code(2, "l2", bucket=bucket, contract=contract)
    before = gaussian(x.size, seed=2) / 8
    residual = before.copy()
    message = kernels.encode(x, code, [Part(x.size, residual=residual)])
    wanted = x + before
    assert_same(message, expected(wanted, code))
    sent = np.empty_like(x)
    kernels.decode(message, sent, code)
    assert_same(residual, wanted - sent)


def test_what_is_not_finite_is_not_fed_back(kernels: Kernels):
    x, code = gaussian(700), Code(4)
    x[3] = np.inf
    residual = np.ones_like(x)
    kernels.encode(x, code, [Part(x.size, residual=residual)])
    assert not residual[:512].any() and residual[512:].any()


@pytest.mark.parametrize("bucket", [64, 1024])
def test_an_owner_feeds_back_its_own_loss_and_owes_nothing_as_a_worker(kernels: Kernels, bucket):
    x, code = gaussian(2 * bucket + 37), Code(3, bucket=bucket)
    left, owed = gaussian(x.size, seed=2) / 8, gaussian(x.size, seed=3) / 8
    before, own = owed.copy(), x + left
    other = kernels.encode(gaussian(x.size, seed=4), code, rank=1)
    value = np.empty_like(x)
    kernels.decode(other, value, code)
    wanted = (own + value) * np.float32(0.5) + before
    part = Part(x.size, residual=left, owner_residual=owed)
    rows = np.stack([np.zeros_like(other), other])
    message = kernels.sum_encode(rows, 0, x, code, [part], factor=0.5)
    assert_same(message, expected(wanted, code, phase=2))
    sent = np.empty_like(x)
    kernels.decode(message, sent, code)
    assert not left.any()
    assert_same(owed, wanted - sent)


def judged(value: NDArray[Any], error: NDArray[Any], bucket: int, every: int) -> list[float]:
    """Return the squared error and the squared magnitude of every so many buckets."""
    taken = np.arange(value.size) // bucket % every == 0
    return [float((each[taken] ** 2).sum()) for each in (error, value)]


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize(
    "code", [Code(4), Code(3, bucket=64), Code(8, bucket=1536), Code(3, bucket=128, scheme="eden")]
)
def test_codes_are_judged_by_every_so_many_buckets(kernels: Kernels, code, every):
    """Those of many tensors, in one launch: without a residual, and with what it has kept."""
    x, parts, wanted, at, message_at = gaussian(19000), [], [], 0, 0
    for tensor, count in enumerate([1, 7000, 64, 1, 2048, 333, 0, 8 * code.bucket // 3]):
        residual = gaussian(count, seed=2) / 8 if tensor % 2 else None
        parts.append(Part(count, at, 0, tensor, message_at, residual=residual))
        at, message_at = at + count, message_at + code.bytes(count)
    message = kernels.encode(x, code, parts)
    sent = np.zeros_like(x)
    kernels.decode(message, sent, code, parts)
    for part in parts:
        its = slice(part.at, part.at + part.count)
        value, code_of = x[its].astype(np.float64), sent[its].astype(np.float64)
        error = value - code_of if part.residual is None else part.residual.astype(np.float64)
        wanted.append(judged(code_of + error, error, code.bucket, every))
    got = kernels.judge(x, message, code, parts, every=every)
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9)
    assert got[1].all()


@pytest.mark.parametrize("scheme", ["qsgd", "eden"])
def test_what_is_not_finite_is_not_judged(kernels: Kernels, scheme):
    """And x is not read where all that was lost was kept."""
    x, code = gaussian(1300), Code(4, scheme=scheme)
    x[3], residual = np.nan, np.zeros_like(x)
    part = Part(x.size, residual=residual)
    message = kernels.encode(x, code, [part])
    sent = np.empty_like(x)
    kernels.decode(message, sent, code)
    rest = (sent[512:] + residual[512:].astype(np.float64), residual[512:].astype(np.float64))
    wanted = judged(*rest, 512, 1)
    got = kernels.judge(None, message, code, [part])
    np.testing.assert_allclose(got, [wanted], rtol=1e-9)


def test_what_is_judged_has_the_type_of_the_elements(kernels: Kernels):
    x, code = gaussian(700).astype(np.float64), Code(4)
    message = kernels.encode(x, code)
    sent = np.empty_like(x)
    kernels.decode(message, sent, code)
    wanted = judged(x.astype(np.float32).astype(np.float64), 0 * x, 512, 1)[1]
    ((error, energy),) = kernels.judge(x, message, code, [Part(700)], dtype="float64")
    np.testing.assert_allclose([error, energy], [((x - sent) ** 2).sum(), wanted], rtol=1e-5)


@given(
    count=st.integers(1, 3000),
    bits=st.sampled_from(list(BITS)),
    bucket=st.sampled_from((64, 192, 256, 512, 640, 2048)),
    norm=st.sampled_from(("max", "l2")),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_any_run_comes_back_within_a_level(kernels: Kernels, count, bits, bucket, norm, seed):
    x, code = gaussian(count, seed), Code(bits, norm, bucket=bucket)
    message = kernels.encode(x, code)
    assert_same(message, expected(x, code))
    out = np.empty_like(x)
    kernels.decode(message, out, code)
    level = scales_of(message, code, count).repeat(bucket)[:count] / (2 ** (bits - 1) - 1)
    assert (np.abs(out - x) <= level * np.float32(1 + 1e-5)).all()


@pytest.mark.parametrize(
    ("code", "message"),
    [(Code(9), "bits"), (Code(1), "bits"), (Code(4, bucket=100), "bucket")],
)
def test_what_the_kernels_cannot_do_is_refused(kernels: Kernels, code, message):
    with pytest.raises(RuntimeError, match=message):
        kernels.encode(gaussian(64), code)


def test_integers_are_refused(kernels: Kernels):
    with pytest.raises(RuntimeError, match="floating"):
        kernels.encode(np.zeros(64, dtype=np.int32), Code())
