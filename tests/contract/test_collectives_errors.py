"""Ranks that disagree all read what differs, with both values; see conftest.py."""

from __future__ import annotations

import re

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def others(hvd):
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")


def odd(hvd):
    """The last rank is the one that differs."""
    return hvd.rank() == hvd.size() - 1


def refused(hvd, call, *values):
    """Every rank raises, naming the values; and the next operation goes well."""
    with pytest.raises(RuntimeError) as caught:
        call()
    assert isinstance(caught.value, hvd.HorovodInternalError)
    for value in (*values, f"rank {hvd.size() - 1}"):
        assert re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", str(caught.value)), caught.value
    assert len(set(hvd.allgather_object(str(caught.value)))) == 1


def test_shapes(framework, hvd):
    for name, (usual, other) in {
        "count": ((31,), (37,)),
        "dimensions": ((31,), (31, 1)),
        "order": ((3, 7), (7, 3)),
    }.items():
        shape = other if odd(hvd) else usual
        tensor = framework.tensor(np.zeros(shape), "float32")
        texts = [str(list(s)) for s in (usual, other)]
        for operation in (hvd.allreduce, hvd.reducescatter):
            refused(hvd, lambda: operation(tensor, name=f"shape.{name}"), *texts)  # noqa: B023
        refused(hvd, lambda: hvd.broadcast(tensor, 0, name=f"shape.{name}"), *texts)  # noqa: B023


def test_all_dimensions_but_the_first(framework, hvd):
    tensor = framework.tensor(np.zeros((4 * hvd.size(), 5 if odd(hvd) else 6)), "float32")
    refused(hvd, lambda: hvd.allgather(tensor, name="rows"), 5, 6)
    refused(hvd, lambda: hvd.alltoall(tensor, name="rows"), 5, 6)


def test_names(framework, hvd, monkeypatch):
    if not framework.has_handles and type(framework).__name__ != "TensorFlow":
        pytest.skip("what waits is inside the framework: that is a warning")
    monkeypatch.setenv("QSGD_DEADLOCK_S", "0.5")
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    tensor = framework.tensor(np.zeros(3), "float32")
    name = "odd" if odd(hvd) else "usual"
    refused(hvd, lambda: hvd.allreduce(tensor, name=name), "allreduce.odd", "allreduce.usual")


def test_types(framework, hvd):
    dtype = "float32" if odd(hvd) else "float64"
    tensor = framework.tensor(np.zeros(hvd.size()), dtype)
    for operation in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        refused(hvd, lambda: operation(tensor, name="type"), "float32", "float64")  # noqa: B023
    refused(hvd, lambda: hvd.broadcast(tensor, 0, name="type"), "float32", "float64")


def test_reductions_and_factors(framework, hvd):
    tensor = framework.tensor(np.zeros(4), "float32")
    op = hvd.Max if odd(hvd) else hvd.Sum
    refused(hvd, lambda: hvd.allreduce(tensor, op=op, name="op"), "max", "sum")
    refused(hvd, lambda: hvd.reducescatter(tensor, op=op, name="op"), "max", "sum")
    factor = 2.5 if odd(hvd) else 1.0
    for which in ("prescale_factor", "postscale_factor"):
        factors = {which: factor}
        refused(
            hvd,
            lambda: hvd.allreduce(tensor, op=hvd.Sum, name="factor", **factors),  # noqa: B023
            "2.500000",
            "1.000000",
        )


def test_roots(framework, hvd):
    tensor = framework.tensor(np.zeros(4), "float32")
    refused(hvd, lambda: hvd.broadcast(tensor, int(odd(hvd)), name="root"), "root", 0, 1)


def test_operations_under_one_name(framework, hvd):
    """Their names say which they are, so ranks that differ in them wait for each other: by hand."""
    tensor = framework.tensor(np.zeros(4), "float32")
    before = hvd.allreduce(tensor, name="same")
    after = hvd.allgather(tensor, name="same")
    assert framework.array(before).shape == (4,)
    assert framework.array(after).shape == (4 * hvd.size(),)


def test_groups_fail_as_one(framework, hvd):
    shapes = [(3,), (5 if odd(hvd) else 7,), (2,)]
    tensors = [framework.tensor(np.zeros(s), "float32") for s in shapes]
    refused(hvd, lambda: hvd.grouped_allreduce(tensors, name="group"), "[5]", "[7]")
    refused(hvd, lambda: hvd.grouped_allreduce(tensors[: 2 + odd(hvd)], name="length"), 2, 3)


def test_mistakes_of_one_rank_are_its_own(framework, hvd):
    tensor = framework.tensor(np.zeros((6, 2)), "float32")
    none = [0] * (hvd.size() - 1)
    not_whole = framework.tensor(np.array([6.5, *none]), "float32")
    for splits in ([6] * hvd.size(), [1], [-1] + [7] * (hvd.size() - 1), [6.5, *none], not_whole):
        if odd(hvd):
            with pytest.raises(ValueError, match="splits"):
                hvd.alltoall(tensor, splits=splits)
    if odd(hvd):
        with pytest.raises(ValueError, match=f"root_rank={hvd.size()}"):
            hvd.broadcast(tensor, hvd.size())
        with pytest.raises(ValueError, match="first dimension"):
            hvd.reducescatter(framework.tensor(1.0, "float32"))
    result = hvd.allreduce(tensor, name="after the mistakes")
    assert framework.array(result).shape == (6, 2)
