"""The compressed allreduces among threads: the same code that runs over MPI, on up to 64 ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from benchmarks.accuracy.formulas import FORMULAS
from qsgd_hpc import _core
from qsgd_hpc.errors import HorovodInternalError, RankFailedError, UsageError

SIZES = (0, 1, 2, 511, 512, 513, 5000)
CODING = {bits: _core.CodecSpec(bits=bits) for bits in (2, 4, 8)}
VARIANCE = {4: 0.036, 8: 1.1e-4}  # w of Gaussian data, max norm, bucket 512
# Those that need no shared memory.
NEED_A_NODE = ("hierarchical_sra", "leaders_sra")
ALGORITHMS = tuple(name for name in _core.COMPRESSED_ALGORITHMS if name not in NEED_A_NODE)


def inputs(ranks, counts, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal(n).astype(dtype) for n in counts] for _ in range(ranks)]


def reduce(data, op="sum", bits=4, coding=None, ids=None, **arguments):
    """Return copies reduced, and every rank's report; the inputs stay as they are."""
    result = [[x.copy() for x in tensors] for tensors in data]
    ids = ids if ids is not None else [17 * i + 5 for i in range(len(data[0]))]
    coding = CODING[bits] if coding is None else coding
    reports = _core.thread_allreduce(result, op=op, coding=coding, ids=ids, **arguments)
    return result, reports


def exact_sum(data, tensor=0):
    return np.stack([d[tensor] for d in data]).astype(np.float64).sum(axis=0)


def nmse(values, exact):
    return np.sum((values.astype(np.float64) - exact) ** 2) / np.sum(exact**2)


def assert_replicas_identical(result):
    for tensors in result[1:]:
        for mine, first in zip(tensors, result[0], strict=True):
            assert mine.tobytes() == first.tobytes()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", range(1, 10))
def test_every_rank_ends_with_the_same_bytes_on_every_run(ranks, algorithm):
    data = inputs(ranks, SIZES)
    result, _ = reduce(data, "average", algorithm=algorithm)
    assert_replicas_identical(result)
    again, _ = reduce(data, "average", algorithm=algorithm)
    assert [x.tobytes() for x in again[0]] == [x.tobytes() for x in result[0]]
    other, _ = reduce(data, "average", algorithm=algorithm, step=1)
    if ranks > 1:
        assert other[0][-1].tobytes() != result[0][-1].tobytes()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", (2, 4, 7))
def test_result_does_not_depend_on_fusion(ranks, algorithm):
    data = inputs(ranks, (3000, 10, 777))
    together, _ = reduce(data, algorithm=algorithm, ids=[1, 2, 3])
    for t in range(3):
        alone, _ = reduce([[d[t]] for d in data], algorithm=algorithm, ids=[t + 1])
        assert alone[0][0].tobytes() == together[0][t].tobytes()


SEVERAL = (
    _core.CodecSpec(bits=2),
    _core.CodecSpec(bits=8, bucket_size=64),
    _core.CodecSpec(bits=4, bucket_size=4096),
    _core.CodecSpec(scheme="topk", k=16),
    _core.CodecSpec(bits=2),
    _core.CodecSpec(scheme="minmax", bits=3),
    _core.CodecSpec(scheme="eden", bits=3),
)


@pytest.mark.parametrize("segment", (0, 1, 1000))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", (1, 2, 3, 7))
def test_each_tensor_of_a_fused_reduction_has_a_code_of_its_own(ranks, algorithm, segment):
    counts, ids = (3000, 10, 9000, 777, 0, 5000, 4000), range(7)
    data = inputs(ranks, counts)
    together, reports = reduce(
        data, algorithm=algorithm, ids=ids, codings=SEVERAL, segment=segment, threads=2
    )
    assert_replicas_identical(together)
    for t, coding in enumerate(SEVERAL):
        single = [[d[t]] for d in data]
        alone, report = reduce(single, algorithm=algorithm, ids=[ids[t]], coding=coding)
        assert alone[0][0].tobytes() == together[0][t].tobytes()
        for mine, other in zip(report, reports, strict=True):
            assert mine["coding_error"][0] == pytest.approx(other["coding_error"][t], rel=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", (2, 3, 6))
def test_result_does_not_depend_on_segments_or_threads(ranks, algorithm):
    data = inputs(ranks, (70_000, 10, 777))
    whole, _ = reduce(data, algorithm=algorithm, segment=10**6)
    for segment, threads in ((1, 1), (1024, 3), (20_000, 2)):
        cut, _ = reduce(data, algorithm=algorithm, segment=segment, threads=threads)
        for mine, first in zip(cut[0], whole[0], strict=True):
            assert mine.tobytes() == first.tobytes()


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("ranks", (2, 4, 7, 16, 64))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_error_of_the_sum_follows_the_formula(algorithm, ranks, bits):
    """Of independent gradients, over w: 1, 2, 3 and 32.9 at 64 ranks and 8 bits."""
    if algorithm == "requantizing_ring" and ranks * VARIANCE[bits] > 1:
        pytest.skip("rounding errors outweigh the sum, and w is that of Gaussian data no more")
    data = inputs(ranks, (512 * 64,), seed=3)
    result, _ = reduce(data, bits=bits, algorithm=algorithm)
    expected = FORMULAS[algorithm](VARIANCE[bits], ranks)
    assert nmse(result[0][0], exact_sum(data)) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_results_are_unbiased(algorithm):
    data = inputs(3, (512 * 4,))
    exact = np.mean([d[0] for d in data], axis=0)
    draws = 200
    results = [reduce(data, "average", algorithm=algorithm, step=t)[0][0][0] for t in range(draws)]
    one = np.mean([np.sum((r - exact) ** 2) for r in results])
    mean = np.sum((np.mean(results, axis=0) - exact) ** 2)
    assert mean == pytest.approx(one / draws, rel=0.3)


@pytest.mark.parametrize("ranks", (2, 4, 6, 7))
@pytest.mark.parametrize("bits", CODING)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_wire_bytes_are_those_of_the_codes(algorithm, ranks, bits):
    """Two passes of all chunks but one's own; the allgather sends everything to everyone."""
    n = 512 * ranks * 10
    _, reports = reduce(inputs(ranks, (n,)), bits=bits, algorithm=algorithm, segment=n)
    chunk = 32 + 10 * 4 + n // ranks * bits // 8
    whole = 32 + ranks * (chunk - 32)
    expected = (ranks - 1) * (whole if algorithm == "allgather" else 2 * chunk)
    assert [r["wire_bytes"] for r in reports] == [expected] * ranks


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_more_ranks_than_buckets_and_than_elements(algorithm):
    for n in (0, 1, 5, 100):
        data = inputs(7, (n,))
        result, _ = reduce(data, bits=8, algorithm=algorithm)
        assert_replicas_identical(result)
        assert np.allclose(result[0][0], exact_sum(data), atol=0.5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_input_of_one_rank_reaches_all(bad, algorithm):
    data = inputs(4, (4096, 100))
    data[2][0][3000] = bad
    result, reports = reduce(data, algorithm=algorithm)
    assert_replicas_identical(result)
    assert not np.isfinite(result[0][0][3000])
    assert np.isfinite(result[0][0][:512]).all()
    for rank, report in enumerate(reports):
        assert report["input_finite"] == [rank != 2, True]
        assert report["result_finite"] == [False, True]


@pytest.mark.parametrize("coding", list(CODING.values()))
def test_a_tensor_larger_than_any_buffer_comes_back_whole(coding):
    data = [[np.full(3_000_001, r + 1, dtype=np.float32)] for r in range(2)]
    result, _ = reduce(data, coding=coding)
    assert np.allclose(result[0][0], 3.0, rtol=1e-6)


def test_compressing_what_cannot_be_is_refused_with_the_remedy():
    with pytest.raises(UsageError, match=r"Compression\.none"):
        reduce([[np.ones(10, dtype=np.int32)]] * 2)
    with pytest.raises(UsageError, match=r"Compression\.none"):
        reduce(inputs(2, (10,)), op="max")


def make_feedback(ranks, counts, ids, bucket=512):
    """Return zeroed worker residuals, and owner residuals of the sizes that the core cuts."""
    residuals = [[np.zeros(n, dtype=np.float32) for n in counts] for _ in range(ranks)]
    owned = [
        [
            np.zeros(n, dtype=np.float32)[owned_range(n, bucket, i, ranks, r)]
            for n, i in zip(counts, ids, strict=True)
        ]
        for r in range(ranks)
    ]
    return residuals, owned


def owned_range(count, bucket, tensor_id, size, rank):
    buckets = -(-count // bucket)
    part = (rank + tensor_id % size) % size
    begin, end = (min(buckets * i // size * bucket, count) for i in (part, part + 1))
    return slice(begin, end)


CONTRACTIONS = {
    "sign": _core.CodecSpec(scheme="sign", bits=1),
    "2-bit": _core.CodecSpec(bits=2, contract=True),
    "topk": _core.CodecSpec(scheme="topk", k=16),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("coding", CONTRACTIONS.values(), ids=CONTRACTIONS)
@pytest.mark.parametrize("ranks", (1, 2, 6))
def test_what_was_sent_and_what_is_left_add_up_to_the_gradients(ranks, coding, algorithm):
    """Sum of results = sum of scaled gradients - the last residuals, worker's and owner's."""
    counts, ids, steps = (5000, 700), (3, 8), 20
    residuals, owed = make_feedback(ranks, counts, ids)
    if algorithm == "allgather" and ranks > 1:
        owed = None
    sent = [np.zeros(n) for n in counts]
    wanted = [np.zeros(n) for n in counts]
    for step in range(steps):
        data = inputs(ranks, counts, seed=step)
        result, _ = reduce(
            data, "average", coding=coding, algorithm=algorithm, ids=ids, step=step,
            residuals=residuals, owner_residuals=owed,
        )  # fmt: skip
        assert_replicas_identical(result)
        for t in range(len(counts)):
            sent[t] += result[0][t]
            wanted[t] += exact_sum(data, t) / ranks
    for t, n in enumerate(counts):
        left = sum(r[t].astype(np.float64) for r in residuals) / ranks
        for r in range(ranks if owed else 0):
            left[owned_range(n, 512, ids[t], ranks, r)] += owed[r][t]
        assert np.allclose(sent[t] + left, wanted[t], atol=1e-4)
        assert ranks == 1 or np.abs(left).max() > 0.01  # there was something to carry


@pytest.mark.parametrize("ranks", (2, 4))
def test_error_feedback_makes_a_biased_code_converge(ranks):
    """The mean of T results of one gradient is off by the last residual over T, not by a bias."""
    coding, steps = CONTRACTIONS["sign"], 200
    data = inputs(ranks, (4096,))
    exact = exact_sum(data)
    residuals, owed = make_feedback(ranks, (4096,), (5,))
    with_feedback = np.zeros(4096)
    for step in range(steps):
        result, _ = reduce(
            data, coding=coding, step=step, residuals=residuals, owner_residuals=owed
        )
        with_feedback += result[0][0] / steps
    without, _ = reduce(data, coding=coding)
    assert nmse(with_feedback, exact) < 0.01
    assert nmse(without[0][0], exact) > 0.2


def test_nan_does_not_stay_in_the_residuals():
    data = inputs(3, (2048,))
    data[1][0][700] = np.nan
    residuals, owed = make_feedback(3, (2048,), (5,))
    reduce(data, residuals=residuals, owner_residuals=owed)
    assert all(np.isfinite(r[0]).all() for r in residuals + owed)
    clean, _ = reduce(inputs(3, (2048,)), residuals=residuals, owner_residuals=owed, step=1)
    assert np.isfinite(clean[0][0]).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_floating_type_gives_the_float32_result_rounded(dtype, algorithm):
    data = inputs(4, (5000, 3), np.float64 if dtype == "float64" else np.float16)
    wide = [[x.astype(np.float32) for x in tensors] for tensors in data]
    if dtype == "bfloat16":
        wide = [[rounded_to_bfloat16(x) for x in tensors] for tensors in wide]
        data = [[(x.view(np.uint32) >> 16).astype(np.uint16) for x in tensors] for tensors in wide]
    result, _ = reduce(data, bits=8, algorithm=algorithm, dtype=dtype)
    expected, _ = reduce(wide, bits=8, algorithm=algorithm)
    assert_replicas_identical(result)
    for mine, float32 in zip(result[0], expected[0], strict=True):
        if dtype == "bfloat16":
            mine = (mine.astype(np.uint32) << 16).view(np.float32)
        assert np.allclose(mine, float32, rtol=0.01, atol=1e-6)


def rounded_to_bfloat16(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sampled_quality_estimates_the_variance_of_what_was_sent(algorithm):
    _, reports = reduce(inputs(4, (512 * 512, 100)), bits=4, algorithm=algorithm)
    for report in reports:
        large = report["coding_error"][0] / report["coded_energy"][0]
        assert large == pytest.approx(VARIANCE[4], rel=0.15)
    # A tensor of one bucket is coded by all but its owner, who gives it as it is.
    coded = [report["coded_energy"][1] > 0 for report in reports]
    assert sum(coded) == (4 if algorithm == "allgather" else 3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_quality_does_not_depend_on_segments_or_threads(algorithm):
    data = inputs(3, (70_000,))
    _, whole = reduce(data, algorithm=algorithm, segment=10**6)
    _, cut = reduce(data, algorithm=algorithm, segment=4096, threads=3)
    for one, other in zip(whole, cut, strict=True):
        assert one["coding_error"] == pytest.approx(other["coding_error"], rel=1e-9)


@pytest.mark.parametrize("bits", CODING)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", (2, 4, 9))
def test_memory_is_bounded_by_the_compressed_size(ranks, algorithm, bits):
    n = 2**19 * ranks
    data = [[np.ones(n, dtype=np.float32)] for _ in range(ranks)]
    compressed = CODING[bits].bytes(n)
    buffers = 2**17  # of a thread
    for segment, most in {
        2**16: 1.5 * compressed + (ranks - 1) * compressed / ranks / 8,
        2**19: 3.5 * compressed,
    }.items():
        _, reports = reduce(data, bits=bits, algorithm=algorithm, segment=segment)
        for report in reports:
            assert 0 < report["peak_bytes"] < most + buffers


def test_codes_of_another_format_are_refused_on_every_rank():
    """Rank 1 codes with another norm, in messages of the same size; both ranks get an error."""
    world = _core.ThreadWorld(2)

    def reduce_on(rank):
        coding = _core.CodecSpec(norm=("max", "l2")[rank])
        x = np.ones(4096, dtype=np.float32)
        _core.Communicator.over_threads(world, rank).allreduce([x], coding=coding, ids=[1])

    assert_both_fail(reduce_on, "refused: norm is")


def assert_both_fail(reduce_on, said):
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(reduce_on, rank) for rank in range(2)]
    for outcome in ranks:
        with pytest.raises((HorovodInternalError, RankFailedError), match=said):
            outcome.result()


def test_codes_of_other_tensors_are_refused_on_every_rank():
    """The ranks agree on the codes, and on all sizes, but not on which tensor has which."""
    world = _core.ThreadWorld(2)
    codings = [_core.CodecSpec(bits=bits) for bits in (2, 8)]

    def reduce_on(rank):
        xs = [np.ones(4096, dtype=np.float32) for _ in codings]
        mine = codings if rank == 0 else codings[::-1]
        _core.Communicator.over_threads(world, rank).allreduce(xs, codings=mine, ids=[1, 2])

    assert_both_fail(reduce_on, "refused: kept elements is")


def test_as_many_codes_as_tensors():
    communicator = _core.Communicator.over_threads(_core.ThreadWorld(1), 0)
    for codings, coding in (([CODING[2]], None), ([CODING[2]] * 2, CODING[4])):
        with pytest.raises(UsageError, match="codings for 2 tensors; pass one for each"):
            communicator.allreduce([np.ones(4, "f4")] * 2, codings=codings, coding=coding)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_that_is_ahead_does_not_flood_the_others(algorithm):
    window = 3  # messages under way per peer and direction
    _, reports = reduce(inputs(4, (200 * 512,)), algorithm=algorithm, segment=512)
    for report in reports:
        assert report["most_waiting"] < 2 * window
