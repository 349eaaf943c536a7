"""Collectives among some of the ranks; see conftest.py."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest


@contextlib.contextmanager
def registered(hvd, *members):
    """Sets of these ranks, forgotten afterwards; ranks that the job lacks are left out."""
    known = [[r for r in ranks if r < hvd.size()] for ranks in members]
    everyone = list(range(hvd.size()))
    sets = [hvd.add_process_set(r) if r != everyone else hvd.global_process_set for r in known if r]
    yield sets
    for each in sets:
        hvd.remove_process_set(each)


def of(framework, value, count=3):
    return framework.tensor(np.full(count, value), "float32")


def test_sets_side_by_side_under_one_name(framework, hvd):
    with registered(hvd, (0, 2), (1, 3)) as sets:
        (mine,) = [s for s in sets if s.included()]
        assert mine.ranks[mine.rank()] == hvd.rank()
        total = sum(mine.ranks)
        for _ in range(3):
            arguments = {"name": "beside", "process_set": mine}
            tensor = of(framework, hvd.rank())
            result = framework.array(hvd.allreduce(tensor, op=hvd.Sum, **arguments))
            assert result.tolist() == [total] * 3
            mean = framework.array(hvd.allreduce(tensor, **arguments))
            np.testing.assert_allclose(mean, total / mine.size())
            gathered = framework.array(hvd.allgather(of(framework, hvd.rank(), 1), **arguments))
            assert gathered.tolist() == mine.ranks
            root = mine.ranks[-1]
            assert framework.array(hvd.broadcast(tensor, root, **arguments)).tolist() == [root] * 3
        everywhere = hvd.allreduce(of(framework, 1), op=hvd.Sum, name="beside")
        assert framework.array(everywhere).tolist() == [hvd.size()] * 3


def test_every_collective_knows_the_set(framework, hvd):
    with registered(hvd, (1, 2, 3)) as sets:
        for each in sets:
            if not each.included():
                continue
            n, me = each.size(), each.rank()
            tensor = framework.tensor(np.arange(2 * n) + 10.0 * me, "float32")
            received = framework.array(hvd.alltoall(tensor, process_set=each))
            right = np.concatenate([10 * r + 2 * me + np.arange(2) for r in range(n)])
            assert received.tolist() == right.tolist()
            share = framework.array(hvd.reducescatter(tensor, op=hvd.Sum, process_set=each))
            whole = n * np.arange(2 * n) + 10 * sum(range(n))
            assert share.tolist() == whole[2 * me : 2 * me + 2].tolist()
            group = hvd.grouped_allreduce([tensor, tensor], op=hvd.Max, process_set=each)
            top = np.arange(2 * n) + 10 * (n - 1)
            assert [framework.array(g).tolist() for g in group] == [top.tolist()] * 2
            hvd.barrier(process_set=each)
            assert hvd.allgather_object(hvd.rank(), process_set=each) == each.ranks
            root = each.ranks[0]
            assert hvd.broadcast_object(hvd.rank(), root, process_set=each) == root


def test_adasum_within_a_set_adds_what_is_orthogonal_and_averages_what_is_equal(framework, hvd):
    with registered(hvd, (0, 2), (1, 3)) as sets:
        (each,) = [s for s in sets if s.included()]
        apart = framework.tensor(np.eye(4)[each.rank()] * (each.rank() + 1), "float32")
        result = framework.array(hvd.allreduce(apart, op=hvd.Adasum, process_set=each))
        right = [1.0, 2.0, 0.0, 0.0] if each.size() == 2 else [1.0, 0.0, 0.0, 0.0]
        np.testing.assert_allclose(result, right, rtol=1e-6)
        same = hvd.allreduce(of(framework, 3.0), op=hvd.Adasum, process_set=each)
        np.testing.assert_allclose(framework.array(same), 3.0, rtol=1e-6)


def test_ranks_outside_are_told_at_once(framework, hvd):
    with registered(hvd, (0,)) as sets:
        for each in sets:
            if not each.included():
                with pytest.raises(ValueError, match=f"rank {hvd.rank()} is not in"):
                    hvd.allreduce(of(framework, 1), process_set=each)
            elif hvd.size() > 1:
                with pytest.raises(ValueError, match="root_rank=1"):
                    hvd.broadcast(of(framework, 1), 1, process_set=each)


def test_a_set_that_is_gone_cannot_be_used(framework, hvd):
    if hvd.size() == 1:
        pytest.skip("the set of all ranks cannot be removed")
    with registered(hvd, (0,)) as sets:
        pass
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(of(framework, 1), process_set=sets[0])


def test_a_list_of_ranks_is_no_set(framework, hvd):
    with pytest.raises(hvd.UsageError, match=r"process_set=\[0\]: pass a hvd\.ProcessSet"):
        hvd.allreduce(of(framework, 1), name="listed", process_set=[0])


def test_ranks_of_a_set_disagree_by_themselves(framework, hvd):
    if hvd.size() < 3:
        pytest.skip("needs a set of two ranks, and one more")
    with registered(hvd, (0, 1)) as sets:
        if sets[0].included():
            with pytest.raises(hvd.HorovodInternalError, match=r"\[[34]\].*\[[34]\]"):
                hvd.allreduce(of(framework, 1, 3 + hvd.rank()), name="odd", process_set=sets[0])
        result = hvd.allreduce(of(framework, 1), op=hvd.Sum, name="odd")
        assert framework.array(result).tolist() == [hvd.size()] * 3
