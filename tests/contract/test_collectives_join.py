"""Ranks that have no more data; see conftest.py."""

from __future__ import annotations

import numpy as np
import pytest


def of(framework, value, count=3):
    return framework.tensor(np.full(count, value), "float32")


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_joined_ranks_add_zeros_that_count_in_averages(framework, hvd, op):
    rounds = 2 * hvd.rank() + 1
    for i in range(rounds):
        result = hvd.allreduce(of(framework, 1.0), name=f"step{i}", op=getattr(hvd, op))
        still = sum(2 * r + 1 > i for r in range(hvd.size()))
        right = still / (hvd.size() if op == "Average" else 1)
        np.testing.assert_allclose(framework.array(result), right, rtol=1e-6)
    assert hvd.join() == hvd.size() - 1
    assert framework.array(hvd.allreduce(of(framework, 1.0), op=hvd.Sum))[0] == hvd.size()


def test_nothing_but_allreduce_goes_on_without_a_joined_rank(framework, hvd):
    if hvd.size() == 1:
        pytest.skip("one rank is not missed")
    if hvd.rank() == 0:
        assert hvd.join() >= 1
        return
    for call in (
        lambda: hvd.allgather(of(framework, 1), name="joined"),
        lambda: hvd.broadcast(of(framework, 1), 1, name="joined"),
        lambda: hvd.alltoall(of(framework, 1, hvd.size()), name="joined"),
    ):
        with pytest.raises(RuntimeError, match="joined"):
            call()
    assert hvd.join() >= 1
