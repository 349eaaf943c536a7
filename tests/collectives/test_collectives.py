"""Exact collectives among threads: the same code that runs over MPI, on 1 to 16 ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from benchmarks.accuracy.formulas import FORMULAS
from qsgd_hpc import _core
from qsgd_hpc.errors import UsageError

RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
SIZES = (0, 1, 2, 511, 512, 513, 5000)
LARGE = 1_000_003  # many segments in every algorithm, and no multiple of anything
NODES = {
    "shared": 24,
    "hierarchical": 2,
    "leaders": 2,
}  # ranks per node that the algorithm is run with
EXACT = tuple(
    name for name in _core.ALGORITHMS if name not in ("auto", *_core.COMPRESSED_ALGORITHMS)
)
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
NUMPY = {"sum": np.sum, "average": np.mean, "min": np.min, "max": np.max, "product": np.prod}


def on_ranks(ranks, work, ranks_per_node=None):
    """Run work(communicator) on every rank; return the results by rank."""
    world = _core.ThreadWorld(ranks)

    def one(rank):
        return work(_core.Communicator.over_threads(world, rank, ranks_per_node))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def inputs(ranks, counts, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    if np.issubdtype(np.dtype(dtype), np.integer):
        return [[rng.integers(0, 8, n).astype(dtype) for n in counts] for _ in range(ranks)]
    return [[rng.standard_normal(n).astype(dtype) for n in counts] for _ in range(ranks)]


def in_messages(report):
    return report["wire_bytes"] - report["shared_memory_bytes"]


def allreduce(data, algorithm, ranks_per_node=None, **options):
    """Return every rank's results and reports; the inputs stay as they are."""
    copies = [[x.copy() for x in tensors] for tensors in data]
    reports = on_ranks(
        len(data),
        lambda c: c.allreduce(copies[c.rank], algorithm=algorithm, **options),
        ranks_per_node or NODES.get(algorithm),
    )
    for tensors in copies[1:]:
        for mine, first in zip(tensors, copies[0], strict=True):
            assert mine.tobytes() == first.tobytes(), "replicas differ"
    return copies[0], reports


@pytest.mark.parametrize("op", NUMPY)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("algorithm", EXACT)
def test_allreduce_equals_numpy_for_every_size_and_operation(algorithm, ranks, op):
    data = inputs(ranks, SIZES)
    result, _ = allreduce(data, algorithm, op=op)
    for t in range(len(SIZES)):
        expected = NUMPY[op](np.stack([d[t] for d in data]).astype(np.float64), axis=0)
        assert np.allclose(result[t], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", EXACT)
def test_allreduce_takes_every_element_type(algorithm, dtype):
    data = inputs(3, (7, 100, 20_000), dtype)
    result, _ = allreduce(data, algorithm)
    tolerance = 1e-2 if dtype == "float16" else 1e-5
    for t in range(3):
        expected = np.stack([d[t] for d in data]).astype(np.float64).sum(axis=0)
        assert result[t].dtype == dtype
        assert np.allclose(result[t], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("algorithm", EXACT)
def test_allreduce_takes_bfloat16(algorithm):
    values = [np.float32([1, 2, -3, 0.5]) * (r + 1) for r in range(3)]
    data = [[(v.view(np.uint32) >> 16).astype(np.uint16)] for v in values]
    result, _ = allreduce(data, algorithm, dtype="bfloat16")
    decoded = (result[0].astype(np.uint32) << 16).view(np.float32)
    assert decoded.tolist() == [6, 12, -18, 3]


@pytest.mark.parametrize("ranks", (2, 3, 4, 7))
@pytest.mark.parametrize("algorithm", EXACT)
def test_large_tensors_come_back_whole_alone_and_fused(algorithm, ranks):
    data = inputs(ranks, (LARGE,), "int32")
    expected = np.stack([d[0] for d in data]).sum(axis=0)
    alone, reports = allreduce(data, algorithm)
    assert np.array_equal(alone[0], expected)
    assert all(r["input_finite"] and r["result_finite"] for r in reports)
    fused, _ = allreduce([[d[0][:777], d[0][777:]] for d in data], algorithm)
    assert np.array_equal(np.concatenate(fused), expected)


def tree_sum(addends):
    """Return the sum in the order of recursive doubling: surplus ranks, neighbours, pairs..."""
    whole = 1 << (len(addends).bit_length() - 1)
    sums = [a.copy() for a in addends[:whole]]
    for rank, addend in enumerate(addends[whole:]):
        sums[rank] += addend
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


@pytest.mark.parametrize("ranks", (*RANKS, 16, 24))
def test_all_that_auto_takes_sums_in_one_order_whatever_is_fused(ranks):
    """One order of additions, so `auto` may choose by size and by place, and jobs repeat."""
    counts = (80_000, 10, 3000, 12_000)  # too large, and small enough, for each shorter way
    data = inputs(ranks, counts)
    expected = [tree_sum([d[t] for d in data]).tobytes() for t in range(len(counts))]
    for algorithm in ("direct", "shared", "recursive_doubling", "rabenseifner", "auto"):
        together, _ = allreduce(data, algorithm)
        assert [x.tobytes() for x in together] == expected
        for t in range(len(counts)):
            alone, _ = allreduce([[d[t]] for d in data], algorithm)
            assert alone[0].tobytes() == expected[t]


@pytest.mark.parametrize("algorithm", EXACT)
def test_bits_do_not_depend_on_what_a_tensor_is_fused_with(algorithm):
    data = inputs(5, (3000,))
    alone, _ = allreduce(data, algorithm, ids=[1])
    more = [[*d, np.ones(100, np.float32)] for d in data]
    fused, _ = allreduce(more, algorithm, ids=[1, 2])
    assert fused[0].tobytes() == alone[0].tobytes()


@pytest.mark.parametrize("algorithm", ("hierarchical", "leaders"))
@pytest.mark.parametrize("ranks_per_node", (2, 3, 4))
@pytest.mark.parametrize("ranks", (4, 6, 7))
def test_hierarchical_sums_within_nodes_first_even_uneven_ones(ranks, ranks_per_node, algorithm):
    data = inputs(ranks, (5000, 33))
    result, _ = allreduce(data, algorithm, ranks_per_node, op="average")
    firsts = range(0, ranks, ranks_per_node)
    for t in range(2):
        nodes = [tree_sum([d[t] for d in data[i : i + ranks_per_node]]) for i in firsts]
        expected = tree_sum(nodes) * np.float32(1 / ranks)
        assert result[t].tobytes() == expected.tobytes()


def test_hierarchical_sends_only_its_shard_across_nodes():
    n = 4 * 64 * 1000
    _, reports = allreduce(inputs(4, (n,)), "hierarchical", 2)
    # 2 (nodes - 1) / nodes of a shard of n / 2 elements.
    assert [in_messages(r) for r in reports] == [n // 2 * 4] * 4
    # Within the node: half of the addends, and half of the sums.
    assert [r["shared_memory_bytes"] for r in reports] == [n * 4] * 4


def test_leaders_send_all_across_nodes_and_the_others_nothing():
    n = 4 * 64 * 1000
    _, reports = allreduce(inputs(4, (n,)), "leaders", 2)
    assert [in_messages(r) for r in reports] == [n * 4, 0] * 2
    assert [r["shared_memory_bytes"] for r in reports] == [n * 4] * 4


@pytest.mark.parametrize("ranks", (2, 3, 4))
@pytest.mark.parametrize("n", (60, 60_000))
def test_shared_memory_hands_over_as_much_as_a_ring_sends(ranks, n):
    _, reports = allreduce(inputs(ranks, (n,)), "shared")
    assert [in_messages(r) for r in reports] == [0] * ranks
    at_once = n * 4 <= 16 << 10  # every rank reads all of every other
    handed = [r["shared_memory_bytes"] for r in reports]
    assert sum(handed) == (ranks - 1) * n * 4 * (ranks if at_once else 2)


@pytest.mark.parametrize("algorithm", ("hierarchical_sra", "leaders_sra"))
@pytest.mark.parametrize("ranks_per_node", (2, 3))
def test_hierarchical_sra_compresses_across_nodes_only(ranks_per_node, algorithm):
    ranks, n, coding = 4, 512 * 64, _core.CodecSpec(bits=8)
    data = inputs(ranks, (n,))
    result, reports = allreduce(data, algorithm, ranks_per_node, coding=coding)
    exact = np.sum([d[0] for d in data], axis=0)
    assert np.sum((result[0] - exact) ** 2) / np.sum(exact**2) < 4 * 1.1e-4
    assert sum(in_messages(r) for r in reports) < 2 * n * 1.1 * 1.05
    more, _ = allreduce([[*d, d[0][:600]] for d in data], algorithm, ranks_per_node, coding=coding)
    assert more[0].tobytes() == result[0].tobytes()


@pytest.mark.parametrize(("nodes", "flat"), [(4, "sra"), (66, "sra2d")])
def test_many_nodes_exchange_in_two_dimensions(nodes, flat):
    """Nodes sum exactly within, so the error is that of as many ranks; it tells the exchange."""
    coding, variance = _core.CodecSpec(bits=4), 0.036  # of Gaussian data
    data = inputs(2 * nodes, (512 * 64,))
    result, _ = allreduce(data, "hierarchical_sra", 2, coding=coding)
    exact = np.sum([d[0] for d in data], axis=0, dtype=np.float64)
    error = np.sum((result[0] - exact) ** 2) / np.sum(exact**2)
    assert error == pytest.approx(FORMULAS[flat](variance, nodes), rel=0.1)


@pytest.mark.parametrize("ranks", (2, 3, 4, 7))
@pytest.mark.parametrize("algorithm", ("direct", "ring"))
def test_sends_the_least_that_any_algorithm_can(algorithm, ranks):
    n = ranks * 64 * 500
    _, reports = allreduce(inputs(ranks, (n,)), algorithm)
    assert [r["wire_bytes"] for r in reports] == [2 * (ranks - 1) * n * 4 // ranks] * ranks


def test_rabenseifner_sends_as_little_on_powers_of_two():
    _, reports = allreduce(inputs(8, (64_000,)), "rabenseifner")
    assert [r["wire_bytes"] for r in reports] == [2 * 7 * 64_000 * 4 // 8] * 8


@pytest.mark.parametrize("algorithm", EXACT)
def test_scales_apply_before_and_after_and_sources_stay(algorithm):
    ranks, n = 3, 30_000
    data = inputs(ranks, (n,))
    targets = [np.empty(n, np.float32) for _ in range(ranks)]

    def work(c):
        source = data[c.rank][0]
        kept = source.copy()
        c.allreduce(
            [(source, targets[c.rank])], algorithm=algorithm, op="average", prescale=2,
            postscale=0.5,
        )  # fmt: skip
        assert np.array_equal(source, kept)

    on_ranks(ranks, work, NODES.get(algorithm))
    assert np.allclose(targets[0], np.mean([d[0] for d in data], axis=0), atol=1e-6)
    assert all(t.tobytes() == targets[0].tobytes() for t in targets)


def test_integers_average_exactly_and_large_ones_keep_their_digits():
    big = 2**60 + 1
    data = [[np.array([big, -7], dtype=np.int64)], [np.array([big, 4], dtype=np.int64)]]
    for algorithm in EXACT:
        result, _ = allreduce(data, algorithm, op="average")
        assert result[0].tolist() == [big, -1]  # -3 / 2 towards zero


@pytest.mark.parametrize("dtype", ("float16", "float32", "float64"))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("algorithm", EXACT)
def test_non_finite_values_reach_every_rank_and_are_reported(algorithm, bad, dtype):
    data = inputs(4, (20_000,), dtype)
    data[2][0][3000] = bad
    result, reports = allreduce(data, algorithm)
    assert not np.isfinite(result[0][3000])
    assert np.isfinite(np.delete(result[0], 3000)).all()
    assert [r["result_finite"] for r in reports] == [False] * 4
    assert [r["input_finite"] for r in reports] == [True, True, False, True]


def test_more_ranks_than_elements():
    for algorithm in EXACT:
        for n in (0, 1, 5):
            result, _ = allreduce(inputs(7, (n,)), algorithm)
            assert result[0].size == n


def test_shared_memory_serves_many_operations_of_mixed_size():
    """Slots are used again and again, by both of its protocols in turn."""
    sizes = [1, 100_000, 3, 3, 40_000, 250_000, 7] * 5

    def work(c):
        for n in sizes:
            x = np.full(n, c.rank + 1, np.int32)
            c.allreduce([x], algorithm="shared")
            assert (x == 10).all()

    on_ranks(4, work, 4)


@pytest.mark.parametrize("ranks", RANKS)
def test_broadcast_copies_from_any_root_at_any_size(ranks):
    for n in (0, 1, 1000, LARGE):
        for root in {0, ranks // 2, ranks - 1}:
            arrays = [np.full(n, r, np.int32) for r in range(ranks)]
            on_ranks(ranks, lambda c, a=arrays, r=root: c.broadcast(a[c.rank], root=r))
            assert all((x == root).all() for x in arrays)


@pytest.mark.parametrize("ranks", RANKS)
def test_allgatherv_and_alltoallv_move_every_part_to_its_place(ranks):
    counts = [3 * r for r in range(ranks)]

    def work(c):
        source = np.full(counts[c.rank], c.rank, np.int16)
        gathered = np.empty(sum(counts), np.int16)
        c.allgatherv(source, gathered, counts=counts)
        assert gathered.tolist() == np.repeat(range(ranks), counts).tolist()
        send = np.repeat(range(ranks), [c.rank + r for r in range(ranks)]) + 100 * c.rank
        received = np.empty(sum(r + c.rank for r in range(ranks)), np.int64)
        c.alltoallv(
            send, [c.rank + r for r in range(ranks)], received, [r + c.rank for r in range(ranks)]
        )
        expected = np.repeat([100 * r + c.rank for r in range(ranks)],
                             [r + c.rank for r in range(ranks)])  # fmt: skip
        assert received.tolist() == expected.tolist()
        c.barrier()

    on_ranks(ranks, work)


@pytest.mark.parametrize("ranks", RANKS)
def test_reducescatter_gives_each_rank_its_part_in_the_same_order(ranks):
    counts = [0, *(70_000 * r + 5 for r in range(1, ranks))]
    data = [x for (x,) in inputs(ranks, (sum(counts),))]
    expected = tree_sum([x * np.float32(2) for x in data]) * np.float32(1 / ranks)
    ends = np.cumsum(counts)

    def work(c):
        out = np.empty(counts[c.rank], np.float32)
        c.reducescatter(data[c.rank], out, counts=counts, op="average", prescale=2)
        part = expected[ends[c.rank] - counts[c.rank] : ends[c.rank]]
        assert out.tobytes() == part.tobytes()

    on_ranks(ranks, work)


def test_some_ranks_reduce_among_themselves_in_their_own_order():
    def work(c):
        members = [3, 1, 4] if c.rank in (1, 3, 4) else [0, 2]
        part = c.subset(members)
        assert part.rank == members.index(c.rank)
        x = np.full(50_000, c.rank, np.float32)
        part.allreduce([x], algorithm="ring")
        assert (x == sum(members)).all()
        with pytest.raises(UsageError, match="list each rank once"):
            c.subset([0, 0, *range(9)])

    on_ranks(5, work)


def test_what_does_not_suit_is_refused_with_the_remedy():
    def fails(match, ranks_per_node=None, **options):
        def work(c):
            with pytest.raises(UsageError, match=match):
                c.allreduce([np.zeros(10, np.float32)], **options)

        on_ranks(2, work, ranks_per_node)

    coding = _core.CodecSpec()
    fails("known are auto, direct", algorithm="tree")
    fails("needs memory shared", algorithm="shared")
    fails("choose hierarchical or auto", ranks_per_node=1, algorithm="shared")
    fails("does not compress", algorithm="ring", coding=coding)
    fails("needs a coding", algorithm="sra")
