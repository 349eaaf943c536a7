"""Adasum among threads, against a reference in numpy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import UsageError
from tests.engine.ranks import on_ranks as on_engines

CODING = _core.CodecSpec(bits=4)
RANKS = (1, 2, 3, 4, 5, 8)
SIZES = (0, 1, 2, 5, 1023, 1025, 10_000)
TOLERANCE = {"float16": 1e-2, "float32": 1e-5, "float64": 1e-12}


def join(a, b):
    """Adasum of two vectors, in float64."""
    dot, aa, bb = a @ b, a @ a, b @ b
    return (1 - (dot / (2 * aa) if aa else 0)) * a + (1 - (dot / (2 * bb) if bb else 0)) * b


def reference(vectors):
    """Join the surplus beyond a power of two first, then pairs at distance 1, 2, 4, ..."""
    power = 1 << (len(vectors).bit_length() - 1)
    tree = [v.astype(np.float64) for v in vectors]
    for surplus in range(power, len(tree)):
        tree[surplus - power] = join(tree[surplus - power], tree[surplus])
    tree = tree[:power]
    while len(tree) > 1:
        tree = [join(a, b) for a, b in zip(tree[::2], tree[1::2], strict=True)]
    return tree[0]


def on_ranks(ranks, work):
    world = _core.ThreadWorld(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        return list(
            pool.map(lambda r: work(_core.Communicator.over_threads(world, r)), range(ranks))
        )


def adasum(data, **options):
    """Reduce copies of data[rank][tensor]; return the result that all ranks share."""
    copies = [[x.copy() for x in tensors] for tensors in data]
    on_ranks(len(data), lambda c: c.allreduce(copies[c.rank], op="adasum", **options))
    for tensors in copies[1:]:
        for mine, first in zip(tensors, copies[0], strict=True):
            assert mine.tobytes() == first.tobytes(), "replicas differ"
    return copies[0]


def inputs(ranks, dtype="float32", sizes=SIZES):
    rng = np.random.default_rng(5)
    common = [rng.standard_normal(n) for n in sizes]  # so that the angles differ from 90 degrees
    return [[(c + rng.standard_normal(c.size)).astype(dtype) for c in common] for _ in range(ranks)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ranks", RANKS)
def test_adasum_equals_the_reference_tensor_by_tensor(ranks, dtype):
    data = inputs(ranks, dtype)
    for t, result in enumerate(adasum(data)):
        expected = reference([tensors[t] for tensors in data])
        assert result.dtype == dtype
        assert np.allclose(result, expected, rtol=0, atol=TOLERANCE[dtype] * ranks)


def test_adasum_takes_bfloat16():
    values = [np.float32([1, 2, -3, 0.5]), np.float32([2, -1, 1, 4])]
    data = [[(v.view(np.uint32) >> 16).astype(np.uint16)] for v in values]
    result = (adasum(data, dtype="bfloat16")[0].astype(np.uint32) << 16).view(np.float32)
    assert np.allclose(result, reference(values), rtol=2**-8)


@pytest.mark.parametrize("ranks", RANKS)
def test_equal_gradients_are_averaged_and_orthogonal_ones_added(ranks):
    x = np.float64([3, -1, 2, 0.5])
    assert np.allclose(adasum([[x]] * ranks)[0], x)
    assert np.allclose(adasum([[row] for row in np.eye(8)[:ranks]])[0], np.eye(8)[:ranks].sum(0))


@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_zero_gradients_leave_the_others_as_they_are(ranks):
    data = [[np.zeros(100, np.float32)] for _ in range(ranks)]
    assert not adasum(data)[0].any()
    data[1][0][:] = 7
    assert (adasum(data)[0] == 7).all()


def test_nan_of_one_rank_reaches_all():
    data = inputs(3, sizes=(10,))
    data[2][0][4] = np.nan
    assert np.isnan(adasum(data)[0]).all()


def test_norms_beyond_float32_are_no_overflow():
    data = [[np.float32([3e38, 0])], [np.float32([0, 3e38])]]
    assert adasum(data)[0].tolist() == np.float32([3e38, 3e38]).tolist()


@pytest.mark.parametrize("ranks", (2, 3, 8))
def test_bits_do_not_depend_on_what_a_tensor_is_fused_with(ranks):
    data = inputs(ranks)
    together = adasum(data)
    for t in range(len(SIZES)):
        alone = adasum([[tensors[t]] for tensors in data])
        assert alone[0].tobytes() == together[t].tobytes()


def test_factors_scale_inputs_and_result():
    data = inputs(4, "float64", (50,))
    result = adasum(data, prescale=3.0, postscale=0.5)[0]
    assert np.allclose(result, 1.5 * reference([d[0] for d in data]))


def test_some_of_the_ranks_may_reduce_alone():
    data = inputs(5, sizes=(300,))
    chosen = [4, 1, 2]

    def work(c):
        x = data[c.rank][0].copy()
        if c.rank in chosen:
            c.subset(chosen).allreduce([x], op="adasum")
        return x

    results = on_ranks(5, work)
    expected = reference([data[r][0] for r in chosen])
    for rank in range(5):
        assert np.allclose(results[rank], expected if rank in chosen else data[rank][0], atol=1e-5)


@pytest.mark.parametrize("call", ["allreduce", "reducescatter"])
def test_integers_are_refused(call):
    x = np.ones(4, np.int32)
    more = {"target": x.copy(), "counts": [4]} if call == "reducescatter" else {}

    def work(c):
        source = x if more else [x]
        with pytest.raises(UsageError, match="Adasum"):
            getattr(c, call)(source, op="adasum", **more)

    on_ranks(1, work)


def test_the_engine_reduces_by_adasum_and_fuses():
    data = inputs(3)

    def program(me):
        handles = [me.allreduce(f"t{i}", x, "adasum") for i, x in enumerate(data[me.rank])]
        for handle in handles:
            handle.wait()

    expected = [reference([tensors[t] for tensors in data]) for t in range(len(SIZES))]
    assert on_engines(3, program) == [None] * 3
    for tensors in data:
        for x, e in zip(tensors, expected, strict=True):
            assert np.allclose(x, e, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "coding", "remedy"),
    [("int64", None, "op=Sum"), ("float32", CODING, "Compression.none")],
)
def test_the_engine_refuses_at_once_what_adasum_cannot_do(dtype, coding, remedy):
    def program(me):
        with pytest.raises(UsageError, match=remedy):
            me.allreduce("w", np.ones(2000, dtype), "adasum", coding)

    assert on_engines(1, program) == [None]
