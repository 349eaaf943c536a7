"""What the engine sees of training steps: how many, how long, and what it did in each."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from qsgd_hpc import _core
from tests.engine.ranks import on_ranks

FOUR = _core.CodecSpec(bits=4, bucket_size=64)
PER_STEP = ("step_s", "wait_s", "comm_s", "coding_s", "wire_bytes")


def reduce_all(me, names, coding=None, count=500, **more):
    """Submit a tensor for each name, then wait for all."""
    handles = [me.allreduce(n, np.ones(count, np.float32), coding=coding, **more) for n in names]
    for handle in handles:
        handle.wait()


def results(size, program, **config):
    """Return what program returned on each rank; raise what it raised."""
    found = on_ranks(size, program, **config)
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


def steps_after(program, size=2, **config):
    """Return the number of steps that each rank's engine has seen."""

    def counted(me):
        program(me)
        return me.engine.stats()["steps"]

    return results(size, counted, **config)


@pytest.mark.parametrize("tensors", [1, 2, 5])
def test_every_round_over_the_tensors_is_one_step(tensors):
    def program(me):
        for _ in range(7):
            reduce_all(me, [f"w{i}" for i in range(tensors)])

    assert steps_after(program) == [7, 7]


def test_each_member_of_a_group_comes_once_per_step():
    def program(me):
        for _ in range(4):
            reduce_all(me, ["a", "b", "c"], group="g", group_size=3)

    assert steps_after(program) == [4, 4]


def test_what_comes_less_often_than_the_gradients_begins_no_step():
    def program(me):
        for step in range(9):
            reduce_all(me, ["w", "v"])
            if step % 3 == 2:
                reduce_all(me, ["train_loss", "test_accuracy"], count=1)

    assert steps_after(program) == [9, 9]


def test_unnamed_tensors_and_other_operations_begin_no_step():
    def program(me):
        for number in range(5):
            reduce_all(me, [f"allreduce.unnamed.{number}"], lasting=False)
            me.broadcast("w", np.ones(10, np.float32)).wait()

    assert steps_after(program) == [0, 0]


def test_the_profile_has_a_value_for_every_step_that_is_over():
    def program(me):
        for _ in range(6):
            reduce_all(me, ["w"])
        return me.engine.step_profile(), me.engine.stats()

    for profile, stats in results(2, program):
        assert profile["steps"] == stats["steps"] == 6
        assert [len(profile[name]) for name in PER_STEP] == [5] * 5
        assert (profile["step_s"] > 0).all()
        assert profile["waits_seen"]
        assert (profile["wire_bytes"] > 0).all()
        # The rest fell into the last step.
        assert 0 < profile["comm_s"].sum() < stats["comm_time_s"]
        assert 0 < profile["wire_bytes"].sum() < stats["wire_bytes"]
        assert 0 <= profile["wait_s"].sum() <= stats["wait_time_s"]


def test_before_the_first_step_the_profile_is_empty():
    def program(me):
        return me.engine.step_profile()

    (profile,) = results(1, program)
    assert profile["steps"] == 0
    assert profile["layers"] == []
    assert all(len(profile[name]) == 0 for name in PER_STEP)


def test_layers_are_in_order_of_submission_and_leave_out_what_comes_now_and_then():
    counts = {"head": 10, "body": 3000, "stem": 70}

    def program(me):
        for step in range(4):
            handles = [me.allreduce(n, np.ones(c, np.float32)) for n, c in counts.items()]
            for handle in handles:
                handle.wait()
            if step == 2:  # the step whose layers are shown
                reduce_all(me, ["accuracy"], count=1)
        return me.engine.step_profile()["layers"]

    for layers in results(2, program):
        assert [(name, elements) for name, elements, _ in layers] == list(counts.items())
        ready_s = [s for _, _, s in layers]
        assert ready_s[0] == 0
        assert ready_s == sorted(ready_s)


def test_a_pause_between_tensors_shows_in_their_times_and_in_the_step():
    def program(me):
        for _ in range(3):
            first = me.allreduce("first", np.ones(10, np.float32))
            time.sleep(0.02)
            second = me.allreduce("second", np.ones(10, np.float32))
            first.wait()
            second.wait()
        return me.engine.step_profile()

    for profile in results(2, program):
        assert profile["layers"][1][2] >= 0.02
        assert (profile["step_s"] >= 0.02).all()


def test_only_the_latest_steps_are_kept_and_all_are_counted():
    def program(me):
        for step in range(11):
            me.allreduce("w", np.ones(10, np.float32)).wait()
            time.sleep(0.01 if step == 8 else 0)
        return me.engine.step_profile()

    (profile,) = results(1, program, kept_steps=4)
    assert profile["steps"] == 11
    assert [len(profile[name]) for name in PER_STEP] == [4] * 5
    assert profile["step_s"][2] >= 0.01  # steps 7, 8, 9 and 10 are there, in this order


@pytest.mark.full
def test_no_more_than_65536_names_are_remembered():
    def program(me):
        x = np.ones(1, np.float32)
        me.allreduce("w", x).wait()
        handle = None
        for number in range(70_000):
            handle = me.allreduce(f"made up {number}", x)
        handle.wait()
        for _ in range(9):
            me.allreduce("one too many", x).wait()
        for _ in range(4):
            me.allreduce("w", x).wait()
        return me.engine.stats()["steps"]

    assert results(1, program) == [5]  # of "w"


def test_threads_that_wait_at_once_count_once():
    def program(me):
        engines[me.rank] = me.engine
        everyone.wait()
        if me.rank == 1:
            while engines[0].stats()["wait_time_s"] < 0.15:  # both threads of rank 0 are in it
                time.sleep(0.001)
            reduce_all(me, ["w", "v"])
            return None
        handles = [me.allreduce(name, np.ones(500, np.float32)) for name in ("w", "v")]
        threads = [threading.Thread(target=handle.wait) for handle in handles]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began, me.engine.stats()["wait_time_s"]

    engines = {}
    everyone = threading.Barrier(2)
    elapsed_s, waited_s = results(2, program)[0]
    assert 0.15 <= waited_s <= elapsed_s


def test_waiting_for_what_is_done_is_no_wait():
    def program(me):
        handle = me.allreduce("w", np.ones(10, np.float32))
        handle.wait()
        before = me.engine.stats()["wait_time_s"]
        handle.wait()
        return before, me.engine.stats()["wait_time_s"]

    for before, after in results(2, program):
        assert before == after


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("auto", {}),
        ("allgather", {}),
        ("requantizing_ring", {}),
        ("sra2d", {}),
        ("hierarchical_sra", {"ranks_per_node": 1}),
    ],
)
def test_coding_takes_time_only_where_something_is_coded(algorithm, more):
    def program(me):
        reduce_all(me, ["exact"])
        exact = me.engine.stats()["coding_time_s"]
        for _ in range(3):
            reduce_all(me, ["w"], FOUR, count=40_000)
        return exact, me.engine.stats(), me.engine.step_profile()

    for exact, stats, profile in results(2, program, algorithm=algorithm, **more):
        assert exact == 0
        assert 0 < stats["coding_time_s"] < stats["comm_time_s"]
        assert 0 < profile["coding_s"].sum() < stats["coding_time_s"]
        assert (profile["coding_s"] <= profile["comm_s"]).all()
