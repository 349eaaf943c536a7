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


def test_operations_without_names_agree_after_a_join(framework, hvd):
    for _ in range(hvd.rank() + 1):
        hvd.allreduce(of(framework, 1.0), op=hvd.Sum)
    for _ in range(2):
        assert hvd.join() >= 0
        assert framework.array(hvd.allreduce(of(framework, 1.0), op=hvd.Sum))[0] == hvd.size()


def test_booleans_are_added_without_a_joined_rank(framework, hvd):
    if hvd.rank() > 0 or hvd.size() == 1:
        for value in (True, False):
            flags = framework.tensor(np.full(3, value), "bool")
            total = hvd.allreduce(flags, name=f"flags.{value}", op=hvd.Sum)
            assert framework.array(total).tolist() == [value] * 3
    assert hvd.join() >= 0


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


def test_a_set_and_groups_go_on_while_another_rank_has_joined(framework, hvd):
    """Rank 0 joins; the others reduce in groups with it, and in a set of their own without it."""
    if hvd.size() < 3:
        pytest.skip("rank 0 and a set of two")
    others = hvd.add_process_set(list(range(1, hvd.size())))
    if hvd.rank() == 0:
        assert hvd.join() >= 1
    else:
        for step in range(3):
            group = hvd.grouped_allreduce(
                [of(framework, 1.0), of(framework, 2.0, 5)], name=f"with zeros{step}", op=hvd.Sum
            )
            values = [framework.array(each)[0] for each in group]
            assert values == [hvd.size() - 1, 2 * (hvd.size() - 1)]
            alone = hvd.allgather(of(framework, hvd.rank(), 1), process_set=others)
            assert framework.array(alone).tolist() == others.ranks
        assert hvd.join() >= 1
    hvd.remove_process_set(others)
    assert framework.array(hvd.allreduce(of(framework, 1.0), op=hvd.Sum))[0] == hvd.size()
