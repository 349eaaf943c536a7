"""The engine on thread ranks: order, agreement, faults, shutdown."""

from __future__ import annotations

import time
import weakref

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import (
    HorovodInternalError,
    NonFiniteGradientError,
    RankFailedError,
    UsageError,
)
from tests.engine.ranks import Rank, on_ranks

CODING = _core.CodecSpec(bits=4)


@pytest.mark.parametrize("size", (1, 2, 3, 4, 7))
def test_tensors_submitted_in_different_orders_find_each_other(size):
    def program(me):
        tensors = {f"t{i}": np.full(100 + i, me.rank + i, dtype=np.float32) for i in range(30)}
        names = sorted(tensors, key=lambda name: hash((name, me.rank)))
        handles = [me.allreduce(name, tensors[name]) for name in names]
        for handle in reversed(handles):
            handle.wait()
        return tensors

    for tensors in on_ranks(size, program):
        for i in range(30):
            assert (tensors[f"t{i}"] == sum(range(size)) + i * size).all()


def test_replicas_stay_identical_over_many_compressed_steps():
    def program(me):
        x = np.random.default_rng(me.rank).standard_normal((8, 1000)).astype(np.float32)
        for _ in range(20):
            for handle in [me.allreduce(f"row{i}", x[i], "average", CODING) for i in range(8)]:
                handle.wait()
        return x.tobytes()

    assert len(set(on_ranks(4, program))) == 1


@pytest.mark.parametrize("root", (0, 2))
def test_broadcast_replaces_every_rank_by_the_root(root):
    def program(me):
        x = np.full(1000, me.rank, dtype=np.int64)
        me.broadcast("x", x, root).wait()
        return x

    for x in on_ranks(5, program):
        assert (x == root).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda me: np.ones(10 + (me.rank == 1), np.float32), ["[10]", "[11]", "shape", "rank 1"]),
        (lambda me: np.ones(10, np.float32 if me.rank else np.float64), ["float32", "float64"]),
    ],
)
def test_disagreement_raises_on_every_rank_with_both_values(change, said):
    results = on_ranks(3, lambda me: me.allreduce("fc.weight", change(me)).wait())
    assert len({str(r) for r in results}) == 1
    for error in results:
        assert isinstance(error, HorovodInternalError)
        assert all(word in str(error) for word in ["fc.weight", *said])


def test_different_compression_raises_and_says_how_to_agree():
    def program(me):
        me.allreduce("w", np.ones(5000, np.float32), coding=CODING if me.rank else None).wait()

    for error in on_ranks(2, program):
        assert "qsgd(bits=4" in str(error)
        assert "QSGD_BITS" in str(error)


def test_engine_goes_on_after_a_disagreement():
    def program(me):
        with pytest.raises(HorovodInternalError):
            me.allreduce("w", np.ones(3 + me.rank, np.float32)).wait()
        x = np.ones(3, np.float32)
        me.allreduce("w", x).wait()
        return x[0]

    assert on_ranks(2, program) == [2, 2]


def test_a_name_in_flight_is_refused_and_its_memory_released():
    def program(me):
        x, y = np.ones(3, np.float32), np.ones(3, np.float32)
        if me.rank == 0:
            first = me.allreduce("w", x)
            refused = y.copy()
            with pytest.raises(UsageError, match="already being worked on"):
                me.allreduce("w", refused)
            released = weakref.ref(refused)
            del refused
            assert released() is None
            me.allreduce("go", y).wait()
            first.wait()
        else:
            me.allreduce("go", y).wait()
            me.allreduce("w", x).wait()
        return x[0]

    assert on_ranks(2, program) == [2, 2]


@pytest.mark.parametrize("leaver", (0, 1, 2))
def test_a_rank_that_leaves_early_is_named_on_all_others(leaver):
    def program(me):
        if me.rank != leaver:
            me.allreduce("w", np.ones(3, np.float32)).wait()

    results = on_ranks(3, program)
    for rank, error in enumerate(results):
        if rank != leaver:
            assert isinstance(error, RankFailedError)
            assert f"rank {leaver} left the job (the test ended)" in str(error)


@pytest.mark.parametrize("coding", [None, CODING])
def test_nan_raises_on_every_rank_with_tensor_and_rank(coding):
    def program(me):
        good, bad = np.ones(2000, np.float32), np.ones(2000, np.float32)
        if me.rank == 1:
            bad[700] = np.nan
        a = me.allreduce("good", good, coding=coding, check_finite=True)
        b = me.allreduce("bad", bad, coding=coding, check_finite=True)
        a.wait()
        b.wait()

    for error in on_ranks(3, program):
        assert isinstance(error, NonFiniteGradientError)
        assert "'bad'" in str(error)
        assert "rank(s) 1" in str(error)


def test_overflow_of_finite_gradients_is_told_apart():
    def program(me):
        me.allreduce("big", np.full(10, 3e38, np.float32), check_finite=True).wait()

    for error in on_ranks(2, program):
        assert "the sum overflowed" in str(error)


def test_nan_may_be_let_through():
    def program(me):
        x = np.full(10, np.nan, np.float32)
        me.allreduce("x", x, check_finite=True).wait()
        return np.isnan(x).all()

    assert on_ranks(2, program, nonfinite="propagate") == [True, True]


def test_abort_ends_a_waiting_rank_with_the_message():
    world = _core.ThreadWorld(2)
    ranks = [Rank(world, r) for r in range(2)]
    handle = ranks[0].allreduce("w", np.ones(3, np.float32))
    ranks[0].engine.abort("rank 1 died")
    with pytest.raises(RankFailedError, match="rank 1 died"):
        handle.wait()
    with pytest.raises(RankFailedError, match="rank 1 died"):
        ranks[0].allreduce("v", np.ones(3, np.float32))
    for rank in ranks:
        rank.engine.shutdown("")


def test_a_stalled_tensor_is_reported_with_the_missing_ranks():
    said = []

    def program(me):
        x = np.ones(3, np.float32)
        if me.rank == 1:
            while not said:
                time.sleep(0.01)
        me.allreduce("late", x).wait()

    on_ranks(3, program, stall_warning_s=0.2, log=said.append)
    assert any("'late'" in line and "rank 1" in line for line in said)


def test_stats_count_what_went_out():
    def program(me):
        me.allreduce("w", np.ones(51200, np.float32), coding=CODING).wait()
        return me.engine.stats()

    for stats in on_ranks(2, program):
        assert stats["gradient_bytes"] == 51200 * 4
        payload = 2 * (32 + 50 * 4 + 25600 // 2)
        assert payload <= stats["wire_bytes"] < payload + 1000


def test_submitting_after_shutdown_says_what_to_do():
    world = _core.ThreadWorld(1)
    rank = Rank(world, 0)
    rank.engine.shutdown("")
    with pytest.raises(UsageError, match="init"):
        rank.allreduce("w", np.ones(3, np.float32))
