"""What the engine moves: allgather, alltoall, reducescatter, barrier, and handles of results."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import HorovodInternalError, RankFailedError, UsageError
from tests.engine.ranks import Rank, on_ranks, output

SIZES = pytest.mark.parametrize("size", (1, 2, 3, 4, 7))


@SIZES
def test_allgather_puts_different_numbers_of_rows_in_rank_order(size):
    def program(me):
        x = np.full((me.rank, 3), me.rank, np.int16)  # rank 0 has nothing
        handle = me.allgather("x", x)
        return output(handle, np.int16), handle.sizes()

    expected = np.repeat(np.arange(size), np.arange(size))[:, None].repeat(3, 1)
    for gathered, sizes in on_ranks(size, program):
        assert np.array_equal(gathered, expected)
        assert gathered.shape == expected.shape
        assert sizes == list(range(size))


@SIZES
def test_alltoall_moves_each_part_to_its_rank(size):
    def program(me):
        splits = [me.rank + r for r in range(size)]
        rows = [(me.rank, to) for to in range(size) for _ in range(splits[to])]
        x = np.array(rows, np.int32).reshape(-1, 2)
        handle = me.alltoall("x", x, splits)
        return output(handle, np.int32), handle.sizes()

    for rank, (received, sizes) in enumerate(on_ranks(size, program)):
        assert sizes == [rank + r for r in range(size)]
        expected = [[r, rank] for r in range(size) for _ in range(rank + r)]
        assert received.tolist() == expected


def test_alltoall_without_splits_cuts_evenly():
    def program(me):
        handle = me.alltoall("x", np.arange(6) + 10 * me.rank)
        return output(handle, np.int64).tolist(), handle.sizes()

    for rank, (received, sizes) in enumerate(on_ranks(3, program)):
        assert received == [10 * r + 2 * rank + i for r in range(3) for i in (0, 1)]
        assert sizes == [2, 2, 2]


@pytest.mark.parametrize(
    ("rows", "splits", "said"),
    [(5, [], "5 rows"), (4, [4], "2 ranks"), (4, [1, 2], "add up"), (4, [5, -1], "none negative")],
)
def test_splits_that_do_not_fit_are_refused_at_once(rows, splits, said):
    def program(me):
        with pytest.raises(UsageError, match=said):
            me.alltoall("x", np.ones(rows), splits)
        return output(me.alltoall("x", np.ones(2)), float).sum()  # the engine goes on

    assert on_ranks(2, program) == [2, 2]


@pytest.mark.parametrize("op", ["sum", "average", "min", "max", "product"])
@pytest.mark.parametrize("rows", (0, 1, 5, 8))
@SIZES
def test_reducescatter_gives_the_first_ranks_a_row_more(size, rows, op):
    def program(me):
        x = np.arange(2 * rows, dtype=np.float64).reshape(rows, 2) + me.rank + 1
        return output(me.reducescatter("x", x, op), np.float64)

    base = np.arange(2 * rows, dtype=np.float64).reshape(rows, 2)
    ranks = np.stack([base + r + 1 for r in range(size)])
    reduce = {"sum": np.sum, "average": np.mean, "min": np.min, "max": np.max, "product": np.prod}
    parts = np.array_split(reduce[op](ranks, axis=0), size)
    for mine, expected in zip(on_ranks(size, program), parts, strict=True):
        assert mine.shape == expected.shape
        assert np.allclose(mine, expected)


def test_reducescatter_scales_and_averages_integers_by_division():
    def program(me):
        x = np.full(4, 3, np.int32)
        scaled = me.reducescatter("f", x.astype(np.float32), prescale=0.5, postscale=4.0)
        return output(me.reducescatter("i", x, "average"), np.int32), output(scaled, np.float32)

    for averaged, scaled in on_ranks(2, program):
        assert averaged.tolist() == [3, 3]
        assert scaled.tolist() == [12, 12]


def test_nobody_passes_a_barrier_before_all_have_come():
    came = []

    def program(me):
        if me.rank == 2:
            me.allreduce("late", np.ones(1)).wait()
        else:
            late = me.allreduce("late", np.ones(1))
            late.wait()
        came.append(me.rank)
        me.barrier("b").wait()
        return len(came)

    assert on_ranks(4, program) == [4] * 4


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda me: me.allgather("x", np.ones((2, 2 + me.rank))), ["[2, 2]", "[2, 3]", "first"]),
        (lambda me: me.alltoall("x", np.ones((2, 2 + me.rank))), ["[2, 2]", "[2, 3]", "first"]),
        (lambda me: me.allgather("x", np.ones((2,) * (1 + me.rank))), ["[2]", "[2, 2]"]),
        (lambda me: me.reducescatter("x", np.ones(2 + me.rank)), ["[2]", "[3]", "shape"]),
        (lambda me: me.reducescatter("x", np.ones(2), ["sum", "max"][me.rank]), ["sum", "max"]),
        (lambda me: me.allgather("x", np.ones(2, ["f4", "i4"][me.rank])), ["float32", "int32"]),
        (lambda me: me.broadcast("x", np.ones(2), me.rank), ["root", "has root rank 1", "has 0"]),
        (
            lambda me: (me.alltoall if me.rank else me.allgather)("x", np.ones(2)),
            ["operation", "alltoall", "allgather"],
        ),
        (
            lambda me: (me.allreduce if me.rank else me.allgather)(
                "x", np.ones((2,) * (1 - me.rank))
            ),
            ["operation", "allreduce", "allgather"],
        ),
    ],
)
def test_disagreement_of_any_kind_raises_on_every_rank_with_both_values(call, said):
    results = on_ranks(2, lambda me: call(me).wait())
    assert len({str(r) for r in results}) == 1
    for error in results:
        assert isinstance(error, HorovodInternalError)
        assert all(word in str(error) for word in ["'x'", "rank 1", *said])


def test_a_tensor_without_dimensions_has_no_rows():
    def program(me):
        me.allgather("x", np.ones(()))

    assert "reshape it to [1]" in str(on_ranks(1, program)[0])


def test_adasum_is_for_allreduce_alone():
    def program(me):
        me.reducescatter("x", np.ones(4), "adasum")

    assert "use allreduce" in str(on_ranks(1, program)[0])


def test_outputs_are_aligned_and_outlive_their_handle():
    def program(me):
        array = output(me.allgather("x", np.full(1000, me.rank, np.uint8)), np.uint8)
        gc.collect()
        return array

    for array in on_ranks(2, program):
        assert array.ctypes.data % 64 == 0
        assert array.sum() == 1000


def test_a_result_is_refused_while_the_operation_is_under_way():
    world = _core.ThreadWorld(2)
    ranks = [Rank(world, r) for r in range(2)]
    handle = ranks[0].allgather("x", np.ones(2))
    with pytest.raises(UsageError, match="still under way"):
        handle.output()
    other = ranks[1].allgather("x", np.ones(3))
    assert output(handle, float).size == output(other, float).size == 5
    leave(ranks)


def test_callbacks_come_once_whether_added_before_or_after_the_end():
    def program(me):
        calls = []
        come = threading.Event()
        handle = me.allreduce("x", np.ones(3))
        handle.add_done_callback(lambda: (calls.append(handle.done()), come.set()))
        handle.wait()
        assert come.wait(60)
        handle.add_done_callback(lambda: calls.append("late"))
        return calls

    assert on_ranks(2, program) == [[True, "late"]] * 2


def test_a_callback_may_submit_the_next_operation():
    def program(me):
        following, come = [], threading.Event()

        def go_on():
            following.append(me.allreduce("next", np.ones(3)))
            come.set()

        me.allreduce("first", np.ones(3)).add_done_callback(go_on)
        assert come.wait(60)
        following[0].wait()
        return True

    assert on_ranks(3, program) == [True] * 3


def test_failed_operations_call_back_too():
    world = _core.ThreadWorld(2)
    ranks = [Rank(world, r) for r in range(2)]
    failed = threading.Event()
    handle = ranks[0].allgather("x", np.ones(2))
    handle.add_done_callback(failed.set)
    ranks[0].engine.abort("rank 1 died")
    assert failed.wait(60)
    with pytest.raises(RankFailedError, match="rank 1 died"):
        handle.output()
    leave(ranks)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_in_a_callback_does_not_stop_the_engine():
    def program(me):
        handle = me.allreduce("x", np.ones(3))
        handle.add_done_callback(lambda: 1 / 0)
        handle.wait()
        x = np.ones(3)
        me.allreduce("y", x).wait()
        return x[0]

    assert on_ranks(2, program) == [2, 2]


class Owner:
    """Something that can be watched going away."""

    def __init__(self):
        self.memory = np.ones(4)


def start(rank, name):
    """Submit memory that only the core keeps; return the handle and who watches the owner."""
    owner = Owner()
    operation = _core.Operation(kind="broadcast", name=name, shape=[4], dtype="float64")
    pointer = owner.memory.ctypes.data
    return rank.engine.start(operation, pointer, pointer, owner), weakref.ref(owner)


def leave(ranks):
    threads = [threading.Thread(target=r.engine.shutdown, args=("the test ended",)) for r in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_memory_is_kept_until_the_core_has_done_with_it_even_without_a_handle():
    world = _core.ThreadWorld(2)
    ranks = [Rank(world, r) for r in range(2)]
    dropped, watch = start(ranks[0], "x")
    del dropped
    gc.collect()
    assert watch() is not None
    held, other = start(ranks[1], "x")
    held.wait()
    assert other() is None  # though the handle lives on
    leave(ranks)
    assert watch() is None


def test_memory_of_a_lost_job_is_kept_for_ever():
    world = _core.ThreadWorld(2)
    ranks = [Rank(world, r) for r in range(2)]
    handle, watch = start(ranks[0], "x")
    ranks[0].engine.abort("rank 1 died")
    with pytest.raises(RankFailedError):
        handle.wait()
    leave(ranks)
    del handle, ranks
    gc.collect()
    assert watch() is not None
