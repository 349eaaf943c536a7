"""Allreduce among threads: the same code that runs over MPI, on up to 64 ranks in one process."""

from __future__ import annotations

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import UsageError

RANKS = (1, 2, 3, 4, 7)
SIZES = (0, 1, 2, 511, 512, 513, 5000)
CODING = {2: (2, 512, "max"), 4: (4, 512, "max"), 8: (8, 512, "max")}


def inputs(ranks, counts, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    if np.issubdtype(dtype, np.integer):
        return [[rng.integers(0, 8, n).astype(dtype) for n in counts] for _ in range(ranks)]
    return [[rng.standard_normal(n).astype(dtype) for n in counts] for _ in range(ranks)]


def reduce(data, op="sum", coding=None, step=0, seed=0, ids=None):
    """Return copies reduced; the inputs stay as they are."""
    result = [[x.copy() for x in tensors] for tensors in data]
    ids = ids if ids is not None else [17 * i + 5 for i in range(len(data[0]))]
    sent = _core.thread_allreduce(result, op=op, coding=coding, ids=ids, step=step, seed=seed)
    return result, sent


def assert_replicas_identical(result):
    for tensors in result[1:]:
        for mine, first in zip(tensors, result[0], strict=True):
            assert mine.tobytes() == first.tobytes()


@pytest.mark.parametrize("op", ["sum", "average", "min", "max", "product"])
@pytest.mark.parametrize("ranks", RANKS)
def test_ring_equals_numpy_for_every_size_and_operation(ranks, op):
    data = inputs(ranks, SIZES)
    result, _ = reduce(data, op)
    assert_replicas_identical(result)
    numpy_op = {"sum": np.sum, "average": np.mean, "min": np.min, "max": np.max, "product": np.prod}
    for t in range(len(SIZES)):
        expected = numpy_op[op](np.stack([d[t] for d in data]).astype(np.float64), axis=0)
        assert np.allclose(result[0][t], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
)
def test_ring_reduces_every_element_type(dtype):
    data = inputs(3, (7, 100), np.dtype(dtype))
    result, _ = reduce(data)
    assert_replicas_identical(result)
    for t in range(2):
        expected = np.stack([d[t] for d in data]).astype(np.float64).sum(axis=0)
        tolerance = 5e-3 if dtype == "float16" else 1e-6
        assert np.allclose(result[0][t], expected, rtol=tolerance, atol=tolerance)


def test_integers_average_exactly_and_large_ones_keep_their_digits():
    big = 2**60 + 1
    data = [[np.array([big, -7], dtype=np.int64)], [np.array([big, 4], dtype=np.int64)]]
    result, _ = reduce(data, "average")
    assert result[0][0].tolist() == [big, -1]  # -3 / 2 towards zero


@pytest.mark.parametrize("ranks", (2, 3, 4, 7))
def test_ring_sends_the_least_that_any_algorithm_can(ranks):
    n = ranks * 1000
    _, sent = reduce(inputs(ranks, (n,)))
    assert sent == [2 * (ranks - 1) * n * 4 // ranks] * ranks


@pytest.mark.parametrize("coding", [None, *CODING.values()])
@pytest.mark.parametrize("ranks", (2, 3, 4, 7))
def test_result_does_not_depend_on_what_a_tensor_was_fused_with(ranks, coding):
    data = inputs(ranks, (3000, 10, 777))
    together, _ = reduce(data, coding=coding, ids=[1, 2, 3])
    for t in range(3):
        alone, _ = reduce([[d[t]] for d in data], coding=coding, ids=[t + 1])
        assert alone[0][0].tobytes() == together[0][t].tobytes()


@pytest.mark.parametrize("bits", CODING)
@pytest.mark.parametrize("ranks", RANKS)
def test_sra_leaves_every_rank_with_the_same_bytes(ranks, bits):
    data = inputs(ranks, SIZES)
    result, _ = reduce(data, "average", CODING[bits])
    assert_replicas_identical(result)
    again, _ = reduce(data, "average", CODING[bits])
    assert [x.tobytes() for x in again[0]] == [x.tobytes() for x in result[0]]
    other, _ = reduce(data, "average", CODING[bits], step=1)
    if ranks > 1:
        assert other[0][-1].tobytes() != result[0][-1].tobytes()


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("ranks", (2, 4, 7, 16, 64))
def test_sra_error_follows_the_formula(ranks, bits):
    """NMSE = w (p-1)/p + w (1 + w (p-1)/p) of the sum of independent gradients; 2 w at p = 64."""
    n = 512 * 64
    data = inputs(ranks, (n,), seed=3)
    result, _ = reduce(data, coding=CODING[bits])
    exact = np.stack([d[0] for d in data]).astype(np.float64).sum(axis=0)
    nmse = np.sum((result[0][0] - exact) ** 2) / np.sum(exact**2)
    w = {4: 0.036, 8: 1.1e-4}[bits]
    others = (ranks - 1) / ranks
    assert nmse == pytest.approx(w * others + w * (1 + w * others), rel=0.1)


def test_sra_is_unbiased():
    data = inputs(3, (512 * 4,))
    exact = np.mean([d[0] for d in data], axis=0)
    draws = 200
    results = [reduce(data, "average", CODING[4], step=t)[0][0][0] for t in range(draws)]
    one = np.mean([np.sum((r - exact) ** 2) for r in results])
    mean = np.sum((np.mean(results, axis=0) - exact) ** 2)
    assert mean == pytest.approx(one / draws, rel=0.3)


@pytest.mark.parametrize("ranks", (2, 4, 7))
@pytest.mark.parametrize("bits", CODING)
def test_sra_wire_bytes_are_two_passes_of_the_codes(ranks, bits):
    n = 512 * ranks * 10
    _, sent = reduce(inputs(ranks, (n,)), coding=CODING[bits])
    chunk = 32 + 10 * 4 + n // ranks * bits // 8
    assert sent == [2 * (ranks - 1) * chunk] * ranks


def test_more_ranks_than_buckets_and_than_elements():
    for n in (0, 1, 5, 100):
        result, _ = reduce(inputs(7, (n,)), coding=CODING[8])
        assert_replicas_identical(result)


@pytest.mark.parametrize("coding", [None, CODING[4]])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_input_reaches_every_rank(bad, coding):
    data = inputs(4, (4096,))
    data[2][0][3000] = bad
    result, _ = reduce(data, coding=coding)
    assert_replicas_identical(result)
    assert not np.isfinite(result[0][0][3000])
    assert np.isfinite(result[0][0][:512]).all()


@pytest.mark.parametrize("coding", list(CODING.values()))
def test_a_tensor_larger_than_any_buffer_comes_back_whole(coding):
    data = [[np.full(3_000_001, r + 1, dtype=np.float32)] for r in range(2)]
    result, _ = reduce(data, coding=coding)
    assert np.allclose(result[0][0], 3.0, rtol=1e-6)


def test_compressing_what_cannot_be_is_refused_with_the_remedy():
    with pytest.raises(UsageError, match=r"Compression\.none"):
        reduce(inputs(2, (10,), np.dtype("int32")), coding=CODING[4])
    with pytest.raises(UsageError, match=r"Compression\.none"):
        reduce(inputs(2, (10,)), op="max", coding=CODING[4])
