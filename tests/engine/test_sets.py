"""Process sets, groups and join: who takes part, and what ends together."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import (
    HorovodInternalError,
    NonFiniteGradientError,
    RankFailedError,
    UsageError,
)
from tests.engine.ranks import on_ranks, output

CODING = _core.CodecSpec(bits=8)


def number(handle):
    handle.wait()
    return handle.result()


def test_sets_are_numbered_alike_and_reduce_apart_under_one_name():
    def program(me):
        sets = [[0, 2], [3, 1]]
        ids = [number(me.add_process_set(ranks)) for ranks in sets]
        mine = ids[me.rank % 2]
        whole, part = np.full(9, me.rank + 1.0), np.full(5, me.rank + 1.0)
        handles = [me.allreduce("x", part, "average", process_set=mine), me.allreduce("x", whole)]
        for handle in handles:
            handle.wait()
        return ids, whole[0], part[0]

    results = on_ranks(4, program)
    assert [ids for ids, _, _ in results] == [[1, 2]] * 4
    assert [whole for _, whole, _ in results] == [10] * 4
    assert [part for _, _, part in results] == [2, 3, 2, 3]


def test_every_operation_counts_the_ranks_of_its_set():
    def program(me):
        members = [1, 2, 4]
        ours = number(me.add_process_set(members))
        if me.rank not in members:
            return None
        more = {"process_set": ours}
        x = np.full((3, 2), me.rank)
        root = x.copy()
        me.broadcast("root", root, 4, **more).wait()
        me.barrier("b", **more).wait()
        gathered = me.allgather("g", x[:1], **more)
        swapped = me.alltoall("s", x, **more)
        part = output(me.reducescatter("p", x, **more), np.int64)
        coded = np.full(2000, float(me.rank))
        me.allreduce("c", coded, "average", CODING, error_feedback=True, **more).wait()
        results = [output(h, np.int64)[:, 0].tolist() for h in (gathered, swapped)]
        return root[0, 0], *results, part.tolist(), gathered.sizes(), round(coded.mean(), 1)

    results = on_ranks(5, program)
    for rank in (1, 2, 4):
        assert results[rank] == (4, [1, 2, 4], [1, 2, 4], [[7, 7]], [1, 1, 1], 2.3)


def test_random_orders_in_overlapping_sets_never_deadlock():
    sets = [[0, 1], [1, 2, 3], [0, 3], [2], [0, 1, 2, 3]]

    def program(me):
        ids = {0: list(range(4))}
        for ranks in sets[:4]:
            ids[number(me.add_process_set(ranks))] = ranks
        order = random.Random(me.rank)
        for step in range(20):
            mine = [(i, n) for i, ranks in ids.items() if me.rank in ranks for n in range(5)]
            order.shuffle(mine)
            work = []
            for i, n in mine:
                x = np.full(50 * n, me.rank + step)
                more = {"process_set": i}
                handle = me.allgather(f"t{n}", x, **more) if n % 2 else me.allreduce(
                    f"t{n}", x, **more)  # fmt: skip
                work.append((i, n, x, handle))
            for i, n, x, handle in work:
                values = [r + step for r in ids[i]]
                result = output(handle, x.dtype) if n % 2 else (handle.wait(), x)[1]
                expected = np.repeat(values, 50 * n) if n % 2 else np.full(50 * n, sum(values))
                assert np.array_equal(result, expected)
        return True

    assert on_ranks(4, program) == [True] * 4


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda me: me.allreduce("x", np.ones(2), process_set=7), "no process set 7"),
        (lambda me: me.allreduce("x", np.ones(2), process_set=1), "not in process set 1"),
        (lambda me: me.broadcast("x", np.ones(2), 1, process_set=2), "root_rank=1 is not in"),
        (lambda me: me.remove_process_set(0), "all ranks"),
        (lambda me: me.remove_process_set(9), "no process set 9"),
        (lambda me: me.add_process_set([]), "list each"),
        (lambda me: me.add_process_set([0, 0]), "list each"),
        (lambda me: me.add_process_set([0, 2]), "list each"),
    ],
)
def test_misuse_is_refused_at_once(use, said):
    def program(me):
        for rank in (1, 0):
            number(me.add_process_set([rank]))
        if me.rank == 0:
            use(me)

    error = on_ranks(2, program)[0]
    assert isinstance(error, UsageError)
    assert said in str(error)


def test_equal_sets_are_refused_on_every_rank():
    def program(me):
        number(me.add_process_set([1, 2]))
        me.add_process_set([2, 1]).wait()

    for error in on_ranks(3, program):
        assert isinstance(error, UsageError)
        assert "[1, 2] exists already, as 1" in str(error)


def test_different_sets_raise_on_every_rank_with_both():
    def program(me):
        me.add_process_set([0, me.rank + 1] if me.rank < 2 else [0, 1]).wait()

    for error in on_ranks(3, program):
        assert isinstance(error, HorovodInternalError)
        assert "[0, 1]" in str(error)
        assert "[0, 2]" in str(error)


def test_a_set_is_removed_once():
    def program(me):
        ours = number(me.add_process_set([0, 1]))
        first = me.remove_process_set(ours)
        try:
            second = me.remove_process_set(ours)
        except UsageError:  # this rank has heard of the first one: it asks nobody
            return None
        return number(first) == ours, error_of(second), error_of(me.allreduce("x", np.ones(2)))

    results = [None]
    while None in results:
        results = on_ranks(3, program)
    for removed, error, after in results:
        assert removed and after is None
        assert isinstance(error, UsageError) and "was removed already" in str(error)


def test_a_removed_set_is_gone_and_its_waiting_operations_fail():
    def program(me):
        ours = number(me.add_process_set([0, 1]))
        waiting = me.allreduce("x", np.ones(2), process_set=ours) if me.rank == 0 else None
        assert number(me.remove_process_set(ours)) == ours
        with pytest.raises(UsageError, match="no process set"):
            me.allreduce("x", np.ones(2), process_set=ours)
        if waiting:
            with pytest.raises(HorovodInternalError, match="removed while tensor 'x' waited for"):
                waiting.wait()
        return number(me.add_process_set([0, 1]))

    assert on_ranks(3, program) == [2] * 3


def test_nan_in_a_set_names_the_rank_as_the_job_counts():
    def program(me):
        ours = number(me.add_process_set([0, 2]))
        if me.rank == 1:
            return None
        x = np.full(3, np.nan if me.rank else 1, np.float32)
        return me.allreduce("x", x, check_finite=True, process_set=ours).wait()

    assert "rank(s) 2." in str(on_ranks(3, program)[0])


def test_a_rank_that_leaves_fails_its_sets_and_no_others():
    def program(me):
        pair = number(me.add_process_set([0, 1]))
        number(me.add_process_set([1, 2]))
        if me.rank == 2:
            return None
        x = np.ones(3)
        me.allreduce("pair", x, process_set=pair).wait()
        with pytest.raises(RankFailedError, match="rank 2 left"):
            me.allreduce("whole", np.ones(3)).wait()
        return x[0]

    assert on_ranks(3, program) == [2, 2, None]


@pytest.mark.parametrize("fusion_bytes", [0, 64 << 20])
def test_a_group_begins_only_when_whole(fusion_bytes):
    def program(me):
        arrays = [np.ones(10, dtype) for dtype in ("f4", "f4", "i4", "f8")]
        group = {"group": "g", "group_size": 4}
        handles = [me.allreduce(f"t{i}", x, **group) for i, x in enumerate(arrays[:3])]
        me.barrier("all have three").wait()
        early = [handle.done() for handle in handles]
        handles.append(me.allreduce("t3", arrays[3], **group))
        for handle in handles:
            handle.wait()
        return early, [x[0] for x in arrays], me.engine.stats()["fused_reductions"]

    for early, values, reductions in on_ranks(2, program, fusion_bytes=fusion_bytes):
        assert early == [False] * 3
        assert values == [2] * 4
        assert reductions == 3  # the two of one type travel together whatever the fusion size


def test_a_group_fails_as_a_whole():
    def program(me):
        group = {"group": "g", "group_size": 3}
        xs = [np.ones(4, np.float32), np.ones(4 + me.rank, np.float32), np.ones(4, np.int32)]
        return [error_of(h) for h in [me.allreduce(f"t{i}", x, **group) for i, x in enumerate(xs)]]

    for errors in on_ranks(2, program):
        assert all(isinstance(error, HorovodInternalError) for error in errors)
        assert len({str(error) for error in errors}) == 1
        assert "'t1'" in str(errors[0])


def test_a_group_with_nan_fails_as_a_whole():
    def program(me):
        group = {"group": "g", "group_size": 2, "check_finite": True}
        bad = np.full(4, np.inf if me.rank else 0, np.float32)
        handles = [me.allreduce("good", np.ones(4), **group), me.allreduce("bad", bad, **group)]
        return [error_of(handle) for handle in handles]

    for errors in on_ranks(2, program):
        assert all(isinstance(error, NonFiniteGradientError) for error in errors)
        assert "'bad'" in str(errors[0])


def error_of(handle):
    try:
        handle.wait()
    except Exception as error:
        return error


def test_groups_of_gathers_and_scatters_end_together():
    def program(me):
        group = {"group": "g", "group_size": 3}
        x = np.full((2, 2), me.rank)
        handles = [me.allgather(f"t{i}", x[:i], **group) for i in range(2)]
        handles.append(me.reducescatter("s", x, **group))
        return [output(handle, np.int64).tolist() for handle in handles]

    for rank, (none, rows, part) in enumerate(on_ranks(2, program)):
        assert (none, rows, part) == ([], [[0, 0], [1, 1]], [[1, 1]]), rank


def test_different_groups_raise_with_both():
    def program(me):
        more = {"group": "g", "group_size": 1} if me.rank else {}
        me.allreduce("x", np.ones(2), **more).wait()

    for error in on_ranks(2, program):
        assert "has group" in str(error)
        assert "'g' of 1" in str(error)


@pytest.mark.parametrize("longer", (0, 1))
def test_ranks_that_count_a_group_differently_fail_and_go_on(longer):
    def program(me):
        size = 3 if me.rank == longer else 2
        for _ in range(3):  # under the same names again
            handles = [
                me.allreduce(f"t{i}", np.ones(2), group="g", group_size=size) for i in range(size)
            ]
            for error in map(error_of, handles):
                assert "of 2" in str(error) and "of 3" in str(error)
        return me.allreduce("after", np.ones(2)).wait()

    on_ranks(2, program)


GROUPINGS = {
    "one larger": ([("g", "t0 t1"), ("t2", "t2")], [("g", "t0 t1 t2")]),
    "one without": ([("g", "t0"), ("", "t1")], [("g", "t0 t1")]),
    "crossed": ([("g", "t0 t1"), ("h", "t2 t3")], [("g", "t0 t2"), ("h", "t1 t3")]),
}


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_ranks_that_group_tensors_differently_fail_and_go_on(grouping):
    def program(me):
        for turn in range(2):  # under the same names again
            if me.rank == 1:
                me.barrier(f"after you {turn}").wait()
            handles = {
                name: me.allreduce(
                    name, np.ones(2), group=group, group_size=len(members.split()) if group else 0
                )
                for group, members in GROUPINGS[grouping][me.rank]
                for name in members.split()
            }
            if me.rank == 0:
                me.barrier(f"after you {turn}").wait()
            errors = {name: error_of(handle) for name, handle in handles.items()}
            assert all("has group" in str(error) for error in errors.values()), errors
        alike = {"group": "anew", "group_size": 2}
        return [error_of(h) for h in [me.allreduce(n, np.ones(2), **alike) for n in ("t0", "t1")]]

    assert on_ranks(2, program) == [[None, None]] * 2


@pytest.mark.parametrize("grouping_rank", (0, 1))
def test_after_a_group_that_one_rank_did_not_form_each_step_has_its_own_values(grouping_rank):
    def program(me):
        def step(number, grouped=True, meet=lambda: None):
            values = [np.full(2, 10.0 * number + me.rank) for _ in range(2)]
            group = {"group": "g", "group_size": 2} if grouped else {}
            handles = [me.allreduce(f"t{i}", x, **group) for i, x in enumerate(values)]
            meet()
            return [error_of(handle) for handle in handles], [x[0] for x in values]

        errors, _ = step(0, grouped=me.rank == grouping_rank)
        assert all("has group" in str(error) for error in errors), errors
        come = me.barrier("rank 1 has begun the next step").wait
        if me.rank == 0:
            come()
        return [step(1, meet=come if me.rank else lambda: None), step(2)]

    right = [([None, None], [21.0, 21.0]), ([None, None], [41.0, 41.0])]
    assert on_ranks(2, program) == [right, right]


def test_members_that_only_some_ranks_have_fail_the_group():
    def program(me):
        names = ("a", "b") if me.rank else ("a", "c")
        group = {"group": "g", "group_size": 2}
        return [error_of(h) for h in [me.allreduce(name, np.ones(2), **group) for name in names]]

    for errors in on_ranks(2, program):
        for error in errors:
            assert "group 'g' of 2 tensors, but not on rank" in str(error)


def test_a_set_that_is_removed_fails_the_groups_begun_in_it():
    def program(me):
        pair = number(me.add_process_set([0, 1]))
        half = {"group": "g", "group_size": 2, "process_set": pair}
        handle = me.allreduce("x", np.ones(2), **half) if me.rank < 2 else None
        number(me.remove_process_set(pair))
        number(me.join())
        return handle and error_of(handle)

    errors = on_ranks(3, program)
    assert all("was removed while group 'g'" in str(error) for error in errors[:2])


def test_a_rank_that_leaves_fails_the_group_it_has_begun():
    def program(me):
        group = {"group": "g", "group_size": 2}
        first = me.allreduce("a", np.ones(2), **group)
        if me.rank == 0:
            return None
        second = me.allreduce("b", np.ones(2), **group)
        return [type(error_of(handle)) for handle in (first, second)]

    assert on_ranks(3, program) == [None, [RankFailedError] * 2, [RankFailedError] * 2]


@pytest.mark.parametrize("coding", [None, CODING])
@pytest.mark.parametrize("op", ["sum", "average"])
def test_joined_ranks_bring_zeros_and_learn_who_came_last(op, coding):
    """Rank r has r + 1 batches; an average divides by all ranks all the same."""

    def program(me):
        seen = []
        for _ in range(me.rank + 1):
            x = np.full(1000, 1.0, np.float32)
            me.allreduce("w", x, op, coding, error_feedback=coding is not None).wait()
            seen.append(float(x.mean()))
        last = number(me.join())
        y = np.ones(3)
        me.allreduce("after", y).wait()
        return seen, last, y[0]

    size = 4
    for rank, (seen, last, after) in enumerate(on_ranks(size, program)):
        expected = [(size - step) / (size if op == "average" else 1) for step in range(rank + 1)]
        assert np.allclose(seen, expected, rtol=0.02)
        assert (last, after) == (size - 1, size)


def test_adasum_goes_on_without_a_joined_rank():
    def program(me):
        x = np.arange(1.0, 5.0) * (me.rank + 1)
        if me.rank < 2:
            me.allreduce("w", x, "adasum").wait()
        number(me.join())
        return x

    a, b, _ = on_ranks(3, program)
    assert np.allclose(a, np.arange(1.0, 5.0) * 1.5)  # of parallel vectors, the mean
    assert np.array_equal(a, b)


@pytest.mark.parametrize(
    "call",
    [
        lambda me: me.allgather("x", np.ones(2)),
        lambda me: me.broadcast("x", np.ones(2)),
        lambda me: me.alltoall("x", np.ones(4)),
        lambda me: me.reducescatter("x", np.ones(2)),
        lambda me: me.allreduce("x", np.ones(2), "max"),
        lambda me: me.barrier("x"),
    ],
)
def test_what_needs_every_rank_fails_while_one_has_joined(call):
    def program(me):
        error = error_of(call(me)) if me.rank == 0 else None
        number(me.join())
        call(me).wait()  # all are back
        return error

    error = on_ranks(2, program)[0]
    assert isinstance(error, HorovodInternalError)
    assert "rank(s) 1 have joined" in str(error)


def test_a_rank_that_has_joined_submits_nothing():
    def program(me):
        if me.rank == 0:
            joined = me.join()
            with pytest.raises(UsageError, match="after join"):
                me.allreduce("x", np.ones(2))
            me_free.append(True)
            return number(joined)
        while not me_free:
            me.allreduce("y", np.ones(2)).wait()
        return number(me.join())

    me_free: list[bool] = []
    assert on_ranks(2, program) == [1, 1]


def test_a_tensor_named_join_is_no_join():
    def program(me):
        if me.rank == 1:
            assert both_started.wait(10)
        try:
            handles = [me.allreduce(name, np.ones(2)) for name in ("join", "other")]
        finally:
            both_started.set()
        for handle in handles:
            handle.wait()

    both_started = threading.Event()
    assert on_ranks(2, program) == [None, None]


def test_joined_ranks_are_let_go_when_another_leaves():
    def program(me):
        if me.rank == 2:
            return None
        return type(error_of(me.join()))

    assert on_ranks(3, program) == [RankFailedError, RankFailedError, None]
