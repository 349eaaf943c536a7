"""What every collective computes, for every framework, type and shape; see conftest.py."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict

import numpy as np
import pytest

from tests.contract.adapters import FLOATS, INTEGERS, PRECISION

SHAPES = [(), (0,), (1,), (17,), (3, 0, 2), (4, 5, 6)]
DTYPES = ["bool", "uint16", "uint32", *INTEGERS, *FLOATS]
REDUCTIONS = {"Sum": np.add, "Min": np.minimum, "Max": np.maximum, "Product": np.multiply}


@pytest.fixture(params=DTYPES)
def dtype(request, framework):
    if request.param not in framework.dtypes:
        pytest.skip(f"{type(framework).__name__} has no {request.param}")
    return request.param


def values(rank, shape, dtype):
    """Small whole numbers, which every type holds exactly, and so their sums and products."""
    low = 0 if dtype == "bool" or dtype.startswith("u") else -3
    high = 2 if dtype == "bool" else 4
    return np.random.default_rng([rank, *shape]).integers(low, high, shape).astype(np.float64)


def expected(op, size, shape, dtype):
    everyone = [values(rank, shape, dtype) for rank in range(size)]
    if op != "Average":
        reduced = REDUCTIONS[op].reduce(everyone)
        return np.minimum(reduced, 1) if dtype == "bool" else reduced
    mean = np.add.reduce(everyone) / size
    return mean if dtype in FLOATS else np.trunc(mean)


def check(framework, tensor, dtype, values):
    assert framework.dtype(tensor) == dtype
    found = framework.array(tensor)
    assert found.shape == values.shape
    np.testing.assert_allclose(
        found.astype(np.float64), values, rtol=2 * PRECISION.get(dtype, 0), atol=0
    )


@pytest.mark.parametrize("op", ["Average", *REDUCTIONS])
def test_allreduce_of_every_type_and_shape(framework, hvd, dtype, op):
    if (op, dtype) == ("Average", "bool"):
        with pytest.raises(ValueError, match="no average"):
            hvd.allreduce(framework.tensor([True], dtype))
        return
    for shape in SHAPES:
        mine = framework.tensor(values(hvd.rank(), shape, dtype), dtype)
        result = hvd.allreduce(mine, op=getattr(hvd, op))
        check(framework, result, dtype, expected(op, hvd.size(), shape, dtype))
        check(framework, mine, dtype, values(hvd.rank(), shape, dtype))


def test_allreduce_factors_scale_before_and_after(framework, hvd):
    mine = framework.tensor(np.full(5, hvd.rank() + 1.0), "float32")
    total = hvd.size() * (hvd.size() + 1) / 2
    for op, result in ((hvd.Sum, total), (hvd.Average, total / hvd.size())):
        scaled = hvd.allreduce(mine, op=op, prescale_factor=0.5, postscale_factor=6.0)
        np.testing.assert_allclose(framework.array(scaled), 3 * result, rtol=1e-6)


def test_a_name_may_stand_for_another_operation_in_the_next_call(framework, hvd):
    calls = [
        ("Sum", (3,), "float32", 1.0), ("Max", (3,), "float32", 1.0), ("Sum", (3,), "float32", 2.0),
        ("Sum", (2, 2), "float32", 1.0), ("Sum", (3,), "int32", 1.0), ("Sum", (3,), "float32", 1.0),
    ]  # fmt: skip
    for op, shape, dtype, factor in calls:
        mine = framework.tensor(values(hvd.rank(), shape, dtype), dtype)
        options = {"op": getattr(hvd, op), "prescale_factor": factor, "name": "changing"}
        result = hvd.allreduce(mine, **options)
        check(framework, result, dtype, factor * expected(op, hvd.size(), shape, dtype))


def test_large_tensors_arrive_whole(framework, hvd):
    n = 1_000_003
    mine = framework.tensor(np.arange(n) % 1000 + hvd.rank(), "float32")
    result = framework.array(hvd.allreduce(mine, op=hvd.Sum))
    others = hvd.size() * (hvd.size() - 1) / 2
    assert np.array_equal(result, np.arange(n) % 1000 * hvd.size() + others)
    gathered = framework.array(hvd.allgather(mine))
    assert gathered.shape == (hvd.size() * n,)
    assert np.array_equal(gathered[::n], np.arange(hvd.size()))


def test_broadcast_of_every_type_and_shape(framework, hvd, dtype):
    for root, shape in enumerate(SHAPES):
        root %= hvd.size()
        mine = framework.tensor(values(hvd.rank(), shape, dtype), dtype)
        check(framework, hvd.broadcast(mine, root), dtype, values(root, shape, dtype))
        check(framework, mine, dtype, values(hvd.rank(), shape, dtype))


def rows(rank, shape):
    """A shape whose first dimension is the rank's own; rank 1 has none at all."""
    return (0 if rank == 1 else rank + 2, *shape)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_allgather_takes_different_numbers_of_rows(framework, hvd, dtype, shape):
    mine = framework.tensor(values(hvd.rank(), rows(hvd.rank(), shape), dtype), dtype)
    everyone = [values(r, rows(r, shape), dtype) for r in range(hvd.size())]
    check(framework, hvd.allgather(mine), dtype, np.concatenate(everyone))


def test_allgather_of_scalars_is_a_vector_of_ranks(framework, hvd):
    mine = framework.tensor(np.float32(hvd.rank()), "float32")
    check(framework, hvd.allgather(mine), "float32", np.arange(hvd.size(), dtype=np.float64))


@pytest.mark.parametrize("factor", ["prescale_factor", "postscale_factor"])
def test_booleans_are_not_multiplied(framework, hvd, factor):
    mine = framework.tensor(np.ones(3), "bool")
    for reduce in (hvd.allreduce, hvd.reducescatter):
        with pytest.raises(ValueError, match=r"cannot be (multiplied|sent)"):
            reduce(mine, op=hvd.Sum, **{factor: 0.5})


def table(source, target, shape):
    """What one rank sends another: as many rows as both their numbers."""
    return np.full((source + target, *shape), 10.0 * source + target)


@pytest.mark.parametrize("shape", [(), (3,), (0,)])
def test_alltoall_with_splits(framework, hvd, dtype, shape):
    if dtype == "bool":
        pytest.skip("the numbers of ranks would not fit")
    me, ranks = hvd.rank(), range(hvd.size())
    mine = framework.tensor(np.concatenate([table(me, r, shape) for r in ranks]), dtype)
    splits = framework.tensor([me + r for r in ranks], "int32")
    result, received = hvd.alltoall(mine, splits=splits)
    check(framework, result, dtype, np.concatenate([table(r, me, shape) for r in ranks]))
    check(framework, received, "int32", np.array([r + me for r in ranks]))


def test_alltoall_without_splits_sends_equal_parts(framework, hvd):
    mine = framework.tensor(np.arange(2 * hvd.size()) + 100 * hvd.rank(), "int64")
    result = hvd.alltoall(mine)
    parts = [100 * r + 2 * hvd.rank() + np.arange(2) for r in range(hvd.size())]
    check(framework, result, "int64", np.concatenate(parts))


def share(array, size, rank):
    return np.array_split(array, size)[rank]


@pytest.mark.parametrize("op", ["Average", *REDUCTIONS])
def test_reducescatter_cuts_rows_as_evenly_as_can_be(framework, hvd, dtype, op):
    if (op, dtype) == ("Average", "bool"):
        pytest.skip("bool tensors have no average")
    for shape in [(0,), (1,), (17,), (6, 0), (9, 5)]:
        mine = framework.tensor(values(hvd.rank(), shape, dtype), dtype)
        result = hvd.reducescatter(mine, op=getattr(hvd, op))
        whole = expected(op, hvd.size(), shape, dtype)
        check(framework, result, dtype, share(whole, hvd.size(), hvd.rank()))


def test_reducescatter_scales_and_averages_by_default(framework, hvd):
    mine = framework.tensor(np.full(8, hvd.rank() + 1.0), "float32")
    result = hvd.reducescatter(mine, prescale_factor=2.0, postscale_factor=0.25)
    mean = (hvd.size() + 1) / 2
    np.testing.assert_allclose(framework.array(result), mean / 2, rtol=1e-6)
    with pytest.raises(RuntimeError, match="Adasum"):
        hvd.reducescatter(mine, op=hvd.Adasum)


def test_groups_hold_any_types_and_shapes(framework, hvd):
    facts = [((), "float32"), ((3, 2), "int32"), ((0,), "float64"), ((5,), "float16")]
    mine = [framework.tensor(values(hvd.rank(), s, t), t) for s, t in facts]
    for result, (shape, dtype) in zip(hvd.grouped_allreduce(mine, op=hvd.Sum), facts, strict=True):
        check(framework, result, dtype, expected("Sum", hvd.size(), shape, dtype))
    tensors, facts = mine[1:], facts[1:]
    gathered = hvd.grouped_allgather(tensors)
    shares = hvd.grouped_reducescatter(tensors, op=hvd.Max)
    for result, part, (shape, dtype) in zip(gathered, shares, facts, strict=True):
        everyone = [values(r, shape, dtype) for r in range(hvd.size())]
        check(framework, result, dtype, np.concatenate(everyone))
        whole = expected("Max", hvd.size(), shape, dtype)
        check(framework, part, dtype, share(whole, hvd.size(), hvd.rank()))
    assert hvd.grouped_allreduce([]) == []


def test_objects_reach_every_rank(hvd):
    mine = {"rank": hvd.rank(), "text": "é" * 1000 * hvd.rank()}
    everyone = hvd.allgather_object(mine)
    assert [each["rank"] for each in everyone] == list(range(hvd.size()))
    assert [len(each["text"]) for each in everyone] == [1000 * r for r in range(hvd.size())]
    last = hvd.size() - 1
    assert hvd.broadcast_object(mine, root_rank=last) == everyone[last]


def test_functions_without_a_name_reach_every_rank(hvd):
    """Such as those in a scheduler or in a defaultdict."""
    mine = defaultdict(lambda: "none")
    mine["rank"] = hvd.rank()
    for rank, each in enumerate(hvd.allgather_object(mine)):
        assert (each["rank"], each["other"]) == (rank, "none")
    assert hvd.broadcast_object(mine)["other"] == "none"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
def test_a_copied_operation_is_the_same_one(hvd, copied):
    """In arguments of argparse that are copied, or of hvd.run()."""
    for name in ("Average", *REDUCTIONS, "Adasum"):
        assert copied(getattr(hvd, name)) is getattr(hvd, name)


@pytest.mark.parametrize("gathers", [False, True], ids=["broadcast", "allgather"])
def test_an_object_that_has_no_pickle_is_an_error_on_every_rank(hvd, gathers):
    last = hvd.size() - 1
    mine = (i for i in ()) if hvd.rank() == last else 0
    words = "[Pp]ickle" if hvd.rank() == last else f"rank {last} could not pickle its object"
    with pytest.raises(Exception, match=words):
        hvd.allgather_object(mine) if gathers else hvd.broadcast_object(mine, last)
    assert hvd.broadcast_object(hvd.rank(), last) == last


def test_adasum_of_equal_tensors_is_one_of_them(framework, hvd):
    mine = framework.tensor(np.arange(1.0, 8.0), "float32")
    np.testing.assert_allclose(
        framework.array(hvd.allreduce(mine, op=hvd.Adasum)), np.arange(1.0, 8.0), rtol=1e-5
    )
