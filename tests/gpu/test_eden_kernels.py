"""The GPU kernels of EDEN's code write and read the bytes of its definition, lane by lane."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from qsgd_hpc import _core
from tests import reference_eden
from tests.gpu.twin import KEY, Bytes, Code, Kernels, Part

BITS = range(1, 9)
EDGES = (1, 63, 64, 65, 300, 511, 512, 513, 1300)
BUCKETS = (64, 128, 256, 512)

assert_same = np.testing.assert_array_equal


def normal(count: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def code_of(bits: int, bucket: int = 512) -> Code:
    return Code(bits, bucket=bucket, scheme="eden")


def expected(x: NDArray[np.float32], code: Code, **key: int) -> Bytes:
    return reference_eden.message_body(x, bits=code.bits, bucket=code.bucket, **{**KEY, **key})


def values(message: Bytes, code: Code, count: int) -> NDArray[np.float32]:
    return reference_eden.decode_body(message, bits=code.bits, bucket=code.bucket, count=count)


@pytest.mark.parametrize("count", EDGES)
@pytest.mark.parametrize("bits", BITS)
def test_every_width_writes_and_reads_the_bytes_of_the_definition(kernels: Kernels, bits, count):
    x, code = normal(count), code_of(bits)
    message = kernels.encode(x, code)
    assert_same(message, expected(x, code))
    out, own = np.empty_like(x), normal(count, seed=2)
    wanted = values(message, code, count)
    kernels.decode(message, out, code)
    assert_same(out, wanted)
    assert_same(kernels.sum(np.stack([message, message]), 0, own, code), own + wanted)


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_core_and_kernels_write_the_same_bytes(kernels: Kernels, bits):
    """With either generator: a message's seed is Philox's in the core, too."""
    x, spec = normal(1300), _core.CodecSpec(scheme="eden", bits=bits)
    assert_same(kernels.encode(x, code_of(bits)), _core.encode(x, spec=spec, **KEY)[32:])


def test_codes_of_the_rarest_magnitudes(kernels: Kernels):
    """With 8 bits, the last cell contains two edges: 14 of a million elements lie above both."""
    x, code = normal(1 << 20), code_of(8)
    message = kernels.encode(x, code)
    assert_same(message, _core.encode(x, spec=_core.CodecSpec(scheme="eden", bits=8), **KEY)[32:])
    highest = np.count_nonzero(message[4 * x.size // 512 :] % 128 == 127)
    assert highest > 0


@pytest.mark.parametrize("bucket", BUCKETS)
def test_every_bucket_and_every_rest(kernels: Kernels, bucket):
    """Several buckets share a warp, of which the last one may rotate fewer elements."""
    for rest in (0, 1, 65, 130, 300):
        x, code = normal(2 * bucket + rest % bucket), code_of(3, bucket)
        message = kernels.encode(x, code)
        assert_same(message, expected(x, code))
        out = np.empty_like(x)
        kernels.decode(message, out, code)
        assert_same(out, values(message, code, x.size))


@pytest.mark.parametrize("bucket", [64, 512])
def test_many_tensors_in_one_launch(kernels: Kernels, bucket):
    """Each as it would be by itself, wherever it lies in the array and in the message."""
    code, rng = code_of(3, bucket), np.random.default_rng(5)
    counts = [1, 700, 64, 1, 2048, 333, 5]
    x = normal(sum(counts) + 40)
    parts, at, message_at = [], 0, 32
    for tensor, count in enumerate(counts):
        at += int(rng.integers(0, 4))
        parts.append(Part(count, at, bucket * tensor, tensor, message_at))
        at += count
        message_at += code.bytes(count)
    message = kernels.encode(x, code, parts)
    out = np.full_like(x, 9)
    kernels.decode(message, out, code, parts)
    for part in parts:
        mine = slice(part.at, part.at + part.count)
        wanted = expected(x[mine], code, tensor=part.tensor, first_tile=part.first // 64)
        assert_same(message[part.message_at :][: wanted.size], wanted)
        assert_same(out[mine], values(wanted, code, part.count))
        out[mine] = 9
    assert (out == 9).all()


@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1.5e-33, 1e-20, 1e20, 3e38])
@pytest.mark.parametrize("bucket", [128, 512])
def test_where_float32_ends(kernels: Kernels, bucket, scale):
    """In one bucket among others of the same warp, which need no lift."""
    x, code = normal(4 * bucket), code_of(4, bucket)
    x[bucket : 2 * bucket] = (np.clip(x[:bucket], -1, 1) * np.float64(scale)).astype(np.float32)
    x[3 * bucket :] = 0
    message = kernels.encode(x, code)
    assert_same(message, expected(x, code))
    out = np.empty_like(x)
    kernels.decode(message, out, code)
    assert_same(out, values(message, code, x.size))
    assert np.isfinite(out).all() and not kernels.nonfinite[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bucket", [128, 512])
def test_what_is_not_finite_is_reported_and_spoils_its_bucket_alone(kernels: Kernels, bucket, bad):
    x, code = normal(4 * bucket), code_of(4, bucket)
    x[bucket + 7] = bad
    message = kernels.encode(x, code)
    assert kernels.nonfinite[0] == 1
    kernels.nonfinite[0] = 0
    out = np.empty_like(x)
    kernels.decode(message, out, code)
    assert kernels.nonfinite[0] == 1
    assert np.isnan(out).tolist() == np.repeat([False, True, False, False], bucket).tolist()


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_floats(kernels: Kernels, dtype):
    x, code = normal(1300).astype(dtype), code_of(6)
    message = kernels.encode(x, code)
    assert_same(message, expected(x.astype(np.float32), code))
    out = np.empty_like(x)
    kernels.decode(message, out, code)
    assert_same(out, values(message, code, x.size).astype(dtype))


@pytest.mark.parametrize("bucket", [64, 512])
@pytest.mark.parametrize("own", [0, 1, 3])
def test_the_fused_kernel_is_decode_sum_and_encode(kernels: Kernels, own, bucket):
    ranks, count, code = 4, 2 * bucket + 37, code_of(3, bucket)
    inputs = [normal(count, seed=rank) for rank in range(ranks)]
    rows, total = [], np.zeros(count, dtype=np.float32)
    for rank, x in enumerate(inputs):
        rows.append(kernels.encode(x, code, rank=rank))
        value = x if rank == own else values(rows[rank], code, count)
        total = value if rank == 0 else total + value
    rows[own][:] = 0xFF  # nobody reads what the owner would have sent to itself
    factor = np.float32(1 / ranks)
    got = kernels.sum_encode(np.stack(rows), own, inputs[own], code, factor=float(factor))
    assert_same(got, expected(total * factor, code, phase=2))
    assert not kernels.nonfinite[0]


@pytest.mark.parametrize("bucket", [64, 512])
def test_error_feedback_keeps_what_a_code_has_lost(kernels: Kernels, bucket):
    x, code = normal(2 * bucket + 37), code_of(1, bucket)
    before = normal(x.size, seed=2) / 8
    residual = before.copy()
    message = kernels.encode(x, code, [Part(x.size, residual=residual)])
    wanted = x + before
    assert_same(message, expected(wanted, code))
    assert_same(residual, wanted - values(message, code, x.size))


def test_only_tensors_with_a_residual_feed_back(kernels: Kernels):
    """Some buckets of a warp keep what they lose, and others do not."""
    x, code = normal(256), code_of(2, 64)
    residual = np.zeros(64, dtype=np.float32)
    parts = [Part(128, 0, 0, 1, 0), Part(64, 128, 0, 2, code.bytes(128), residual=residual),
             Part(64, 192, 0, 3, code.bytes(128) + code.bytes(64))]  # fmt: skip
    message = kernels.encode(x, code, parts)
    mine = message[code.bytes(128) :][: code.bytes(64)]
    assert_same(mine, expected(x[128:192], code, tensor=2))
    assert_same(residual, x[128:192] - values(mine, code, 64))


@pytest.mark.parametrize(
    ("code", "message"),
    [(code_of(9), "bits"), (code_of(4, 192), "power"), (code_of(4, 1024), "512")],
)
def test_what_the_kernels_cannot_do_is_refused(kernels: Kernels, code, message):
    with pytest.raises(RuntimeError, match=message):
        kernels.encode(normal(64), code)
