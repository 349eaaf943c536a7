"""Ranks that all wait for different tensors hear of it, and only then."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from qsgd_hpc.errors import HorovodInternalError
from tests.engine.ranks import on_ranks

SOON_S = 0.3


def message(call):
    with pytest.raises(HorovodInternalError) as caught:
        call()
    return str(caught.value)


def reduce(me, name, **more):
    x = np.full(3, me.rank + 1.0)
    me.allreduce(name, x, **more).wait()
    return x[0]


def test_different_names_fail_on_every_rank_and_the_job_goes_on():
    def program(me):
        text = message(lambda: reduce(me, "usual" if me.rank < 2 else "odd"))
        return text, reduce(me, "next")

    results = on_ranks(3, program, deadlock_s=SOON_S)
    assert len({text for text, _ in results}) == 1
    assert "rank 2 for 'odd', ranks 0, 1 for 'usual'" in results[0][0]
    assert [total for _, total in results] == [6.0] * 3


def test_operations_in_another_order_fail_by_name():
    def program(me):
        names = ["a", "b"] if me.rank == 0 else ["b", "a"]
        return [message(lambda: reduce(me, name)) for name in names]  # noqa: B023

    for errors in on_ranks(2, program, deadlock_s=SOON_S):
        assert "rank 0 for 'a', rank 1 for 'b'" in errors[0]
        # A rank that hears of the first failure early may submit its second operation in time for
        # the other rank's share of that same failure.
        assert "the ranks wait for one another" in errors[1]


def test_a_member_that_waits_for_its_group_is_waited_for_no_longer():
    def program(me):
        group = {"group": "g", "group_size": 2}
        first = me.allreduce("a", np.ones(3), **group)
        if me.rank == 0:
            me.allreduce("b", np.ones(3), **group)
        return message(first.wait)

    for text in on_ranks(2, program, deadlock_s=SOON_S):
        assert "ranks 0, 1 for 'a'" in text


def test_a_rank_that_computes_is_waited_for():
    def program(me):
        if me.rank == 1:
            time.sleep(5 * SOON_S)
        return reduce(me, "late")

    assert on_ranks(2, program, deadlock_s=SOON_S) == [3.0, 3.0]


def test_a_rank_that_has_submitted_and_computes_is_waited_for():
    def program(me):
        first, second = ("a", "b") if me.rank == 0 else ("b", "a")
        handle = me.allreduce(first, np.full(3, me.rank + 1.0))
        if me.rank == 0:
            time.sleep(5 * SOON_S)
        total = reduce(me, second)
        handle.wait()
        return total

    assert on_ranks(2, program, deadlock_s=SOON_S) == [3.0, 3.0]


def test_a_second_thread_that_goes_on_is_waited_for():
    def program(me):
        first, second = ("a", "b") if me.rank == 0 else ("b", "a")
        found = []
        thread = threading.Thread(target=lambda: found.append(reduce(me, first)))
        thread.start()
        for i in range(5):  # steps of its own, each shorter than the patience
            time.sleep(SOON_S / 3)
            reduce(me, f"step{i}")
        total = reduce(me, second)
        thread.join()
        return total, found

    assert on_ranks(2, program, deadlock_s=SOON_S) == [(3.0, [3.0])] * 2


def test_ranks_of_different_sets_may_wait_for_one_another():
    def program(me):
        handle = me.add_process_set([0, 1])
        handle.wait()
        more = {"process_set": handle.result()} if me.rank == 0 else {}
        return message(lambda: reduce(me, "x", **more))

    errors = on_ranks(3, program, deadlock_s=SOON_S)
    assert "ranks 1, 2 for 'x', rank 0 for 'x' of process set 1" in errors[0]
    assert len(set(errors)) == 1


def test_a_deadlock_in_a_set_is_found_when_the_other_ranks_leave():
    def program(me):
        pair = me.add_process_set([0, 1])
        pair.wait()
        if me.rank == 2:
            time.sleep(3 * SOON_S)  # the others have reported what they wait for
            return None
        return message(lambda: reduce(me, "ab"[me.rank], process_set=pair.result()))

    first, second, _ = on_ranks(3, program, deadlock_s=SOON_S)
    assert first == second
    assert "rank 0 for 'a' of process set 1, rank 1 for 'b' of process set 1" in first


def test_a_rank_that_joined_waits_on():
    def program(me):
        text = ""
        if me.rank > 0:
            text = message(lambda: reduce(me, f"name{me.rank}"))
        handle = me.join()
        handle.wait()
        return text

    errors = on_ranks(3, program, deadlock_s=SOON_S)
    assert errors[0] == ""
    assert "rank 1 for 'name1', rank 2 for 'name2'" in errors[1] == errors[2]


def test_waiting_for_ever_may_be_chosen():
    def program(me):
        first, second = ("a", "b") if me.rank == 0 else ("b", "a")
        thread = threading.Thread(target=reduce, args=(me, first))
        thread.start()
        thread.join(5 * SOON_S)
        total = reduce(me, second)
        thread.join()
        return total

    assert on_ranks(2, program, deadlock_s=0.0) == [3.0, 3.0]
