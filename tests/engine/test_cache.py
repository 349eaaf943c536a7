"""Names that come again travel as numbers, whatever happens to them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from qsgd_hpc import _core
from tests.engine.ranks import on_ranks

CAPACITIES = pytest.mark.parametrize("capacity", (0, 1, 4, 7, 1024))


def control_bytes(me):
    return me.engine.stats()["control_bytes"]


@CAPACITIES
def test_results_do_not_depend_on_the_capacity(capacity):
    """Ten names in random orders push each other out of the smaller books."""

    def program(me):
        order = random.Random(me.rank)
        for step in range(30):
            numbers = random.Random(step).sample(range(10), 6)
            order.shuffle(numbers)
            xs = {n: np.full(n + 1, me.rank + step + n, np.float32) for n in numbers}
            handles = [me.allreduce(f"layer.{n}", x) for n, x in xs.items()]
            for handle in handles:
                handle.wait()
            for n, x in xs.items():
                assert (x == sum(r + step + n for r in range(3))).all()
        return True

    assert on_ranks(3, program, cache_capacity=capacity) == [True] * 3


@CAPACITIES
def test_a_name_may_change_its_facts(capacity):
    def program(me):
        results = []
        for step in range(12):
            x = np.full(3 + step // 2 % 3, me.rank + 1.0, ["f4", "f8"][step // 3 % 2])
            me.allreduce("w", x, ["sum", "max"][step // 4 % 2]).wait()
            results.append((x.size, x.dtype.name, x[0]))
        return results

    results = on_ranks(2, program, cache_capacity=capacity)
    expected = [
        (3 + s // 2 % 3, ["float32", "float64"][s // 3 % 2], [3, 2][s // 4 % 2]) for s in range(12)
    ]
    assert results == [expected] * 2


def test_equal_names_in_several_sets_are_told_apart():
    def program(me):
        ids = [0]
        for ranks in ([0, 1], [1, 2], [0, 2]):
            added = me.add_process_set(ranks)
            added.wait()
            if me.rank in ranks:
                ids.append(added.result())
        for _ in range(5):
            xs = [np.full(4, 10.0**i) for i in ids]
            for handle in [
                me.allreduce("w", x, process_set=i) for i, x in zip(ids, xs, strict=True)
            ]:
                handle.wait()
            assert [x[0] / 10**i for i, x in zip(ids, xs, strict=True)] == [3, 2, 2]
        return True

    assert on_ranks(3, program, cache_capacity=3) == [True] * 3


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_a_step_of_known_tensors_takes_few_control_bytes(budget):
    coding = _core.CodecSpec(bits=8)
    names = [f"module.layer{i // 3}.block{i % 3}.convolution.weight" for i in range(160)]

    def program(me):
        def step():
            xs = [np.ones(64, np.float32) for _ in names]
            handles = [
                me.allreduce(n, x, "average", coding, nmse_budget=budget)
                for n, x in zip(names, xs, strict=True)
            ]
            for handle in handles:
                handle.wait()

        for _ in range(2):
            step()
        me.barrier("b").wait()
        before = control_bytes(me)
        for _ in range(10):
            step()
        return (control_bytes(me) - before) / 10

    with_book = on_ranks(2, program, cycle_time_s=0.005)
    without = on_ranks(2, program, cycle_time_s=0.005, cache_capacity=0)
    # A number and the head of its frame, were every tensor to travel alone; and the errors.
    assert max(with_book) < 160 * (60 + (8 if budget else 0))
    assert min(without) > 160 * 40  # the names alone
    assert sum(with_book) < sum(without) / 4


def test_of_more_names_than_lines_some_are_known():
    def program(me):
        for step in range(11):
            if step == 1:
                before = control_bytes(me)
            for i in range(96):
                me.allreduce(f"module.layer{i}.convolution.weight", np.ones(1, "f4")).wait()
        return control_bytes(me) - before

    def sent(capacity):
        return sum(on_ranks(2, program, cache_capacity=capacity))

    none, some, all_known = sent(0), sent(64), sent(96)
    assert all_known < some < none - 0.2 * (none - all_known)


def test_joined_ranks_follow_names_they_have_never_submitted():
    def program(me):
        for step in range(1 + 3 * me.rank):
            for name in ("a", "b", "c"):
                x = np.ones(5, np.float32)
                me.allreduce(f"{name}{step % 2}", x).wait()
        joined = me.join()
        joined.wait()
        return x[0]

    assert on_ranks(3, program, cache_capacity=2) == [3, 2, 1]
