"""Error feedback inside the encoder: what it sends, and what it keeps for the next step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import UsageError

BUCKET = 128
SIZES = (0, 1, 63, 64, 65, BUCKET - 1, BUCKET, BUCKET + 1, 1300)
KEY = {"seed": 3, "tensor": 9, "step": 11, "rank": 2}
QSGD = [
    {"bits": bits, "norm": norm, "rounding": rounding, "contract": contract}
    for bits, norm, (rounding, contract) in itertools.product(
        range(2, 9),
        ("max", "l2"),
        (("stochastic", False), ("stochastic", True), ("nearest", False)),
    )
]
OTHERS = [
    {"scheme": "sign"},
    {"scheme": "minmax", "bits": 3, "contract": True},
    {"scheme": "nuqsgd", "bits": 4},
    {"scheme": "terngrad", "contract": True},
    {"scheme": "topk", "k": 8},
    {"scheme": "elias", "bits": 5},
    *({"scheme": "eden", "bits": bits} for bits in range(1, 9)),
    *({"scheme": "eden", "bits": 4, "bucket_size": size} for size in (64, 512)),
    {"scheme": "bfloat16"},
]


@pytest.fixture(params=_core.instruction_sets())
def _instruction_set(request):
    _core.use_instruction_set(request.param)
    yield
    _core.use_instruction_set(_core.instruction_sets()[0])


def gradients(count: int, dtype: str = "float32") -> np.ndarray:
    x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    x[BUCKET : 2 * BUCKET] *= 1e-41  # a bucket of denormals: its unit has no inverse
    x[2 * BUCKET : 3 * BUCKET] *= 1e38
    x[3 * BUCKET : 4 * BUCKET] = 0
    if dtype == "bfloat16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return np.clip(x, -6e4, 6e4).astype(dtype) if dtype == "float16" else x.astype(dtype)


def as_float32(x: np.ndarray) -> np.ndarray:
    wide = (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x
    with np.errstate(over="ignore"):
        return wide.astype(np.float32)


def agree(
    x: np.ndarray, options: dict, by: float = 1.0, dtype: str = "", threads: int = 1
) -> np.ndarray:
    """Encode with what was left, compare with the definition, and return what is left now."""
    spec = _core.CodecSpec(**{"bucket_size": BUCKET} | options)
    left = np.random.default_rng(7).standard_normal(x.size).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        value = as_float32(x) * np.float32(by) + left
        message = _core.encode(value, spec=spec, **KEY)
        sent = _core.decode(message, count=x.size, spec=spec)
        rest = value - sent
    got = np.empty_like(message)
    finite = _core.encode_into(
        x, got, spec=spec, by=by, left=left, dtype=dtype, threads=threads, **KEY
    )
    assert finite == bool(np.isfinite(value).all())
    assert got.tobytes() == message.tobytes()
    np.testing.assert_array_equal(left, np.where(np.isfinite(rest), rest, 0))
    return left


@pytest.mark.usefixtures("_instruction_set")
@pytest.mark.parametrize("options", [*QSGD, *OTHERS], ids=lambda o: "-".join(map(str, o.values())))
def test_it_sends_the_value_with_what_was_left_and_keeps_the_rest(options):
    for count in SIZES:
        agree(gradients(count), options)
    agree(gradients(1300), options, by=0.25)


@pytest.mark.usefixtures("_instruction_set")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_elements_of_any_floating_type_leave_float32(dtype):
    codes = ({"bits": 4}, {"scheme": "topk", "k": 8}, {"scheme": "eden", "bits": 4})
    for options, count in itertools.product(codes, (65, 1300)):
        agree(gradients(count, dtype), options, by=0.5, dtype=dtype)


@pytest.mark.usefixtures("_instruction_set")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4},
        {"bits": 2, "contract": True},
        {"scheme": "topk", "k": 8},
        {"scheme": "eden", "bits": 4},
    ],
)
def test_a_bucket_that_is_not_finite_leaves_nothing(options, bad):
    x = np.ones(4 * BUCKET, dtype=np.float32) / 3
    x[BUCKET + 5] = bad
    left = agree(x, options)
    assert left[:BUCKET].any()
    assert not left[BUCKET + 5]
    assert np.isfinite(left).all()


@pytest.mark.parametrize(
    "options", [{"bits": 8}, {"bits": 2, "contract": True}, {"scheme": "eden", "bits": 4}]
)
def test_any_number_of_threads_leaves_the_same(options):
    x = np.resize(gradients(1300), 1 << 20)
    assert agree(x, options).tobytes() == agree(x, options, threads=3).tobytes()


def test_the_contraction_is_that_of_its_definition_where_it_is_rarely_needed():
    """Four bits lose more than they carry only where few elements tower above many."""
    rng = np.random.default_rng(5)
    for spread in (0.05, 0.15, 0.3, 0.6, 1.0):
        x = (rng.standard_normal(512) * spread).astype(np.float32)
        x[17] = 7  # a level is 1
        scales = []
        for contract in (False, True):
            spec = _core.CodecSpec(bits=4, bucket_size=512, contract=contract)
            scales.append(_core.encode(x, spec=spec, **KEY)[32:36].view(np.float32)[0])
        f = np.rint(x.astype(np.float64) * 65536) / 65536 % 1
        w = np.sum(f * (1 - f)) / np.sum(x.astype(np.float64) ** 2)
        assert scales[0] == 7
        assert scales[1] == pytest.approx(7 / (1 + w) if w >= 1 else 7, rel=1e-6)


def test_another_number_of_elements_left_is_refused():
    spec = _core.CodecSpec(bits=4)
    message = np.empty(32 + spec.bytes(10), dtype=np.uint8)
    with pytest.raises(UsageError, match="has 9 elements, x has 10"):
        _core.encode_into(
            np.zeros(10, np.float32), message, spec=spec, left=np.zeros(9, np.float32)
        )
