"""Control messages between ranks of a node go through memory, whatever their number and size."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.engine.ranks import on_ranks

LINE = 64
MAILBOX = 126 * LINE


def reduce_all(me, names, step):
    xs = [np.full(3, me.rank + step + i, np.float32) for i in range(len(names))]
    handles = [me.allreduce(name, x) for name, x in zip(names, xs, strict=True)]
    for handle in handles:
        handle.wait()
    return [x[0] for x in xs]


def expected(size, count, step):
    return [sum(r + step + i for r in range(size)) for i in range(count)]


@pytest.mark.parametrize("ranks_per_node", (None, 1, 2, 3))
def test_which_ranks_have_mail(ranks_per_node):
    def program(me):
        assert reduce_all(me, ["a", "b"], 0) == expected(3, 2, 0)
        me.barrier("end").wait()
        return me.engine.stats()["mailed_bytes"] > 0

    nodes = {None: [False] * 3, 1: [False] * 3, 2: [True, True, False], 3: [True] * 3}
    assert on_ranks(3, program, ranks_per_node=ranks_per_node) == nodes[ranks_per_node]


def test_what_finds_no_room_in_a_mailbox_keeps_its_order():
    """Names of all lengths, by the hundred: bursts that no mailbox and no frame can hold."""
    lengths = random.Random(0)
    names = [f"{i}." + "n" * lengths.choice([1, 40, 50, 60, 400, 1000]) for i in range(600)]
    assert sum(map(len, names)) > 10 * MAILBOX

    def program(me):
        order = random.Random(me.rank)
        for step in range(3):
            mine = list(enumerate(names))
            order.shuffle(mine)
            xs = {i: np.full(2, me.rank + step + i, np.float32) for i, _ in mine}
            handles = [me.allreduce(name, xs[i]) for i, name in mine]
            for handle in handles:
                handle.wait()
            assert [xs[i][0] for i in range(600)] == expected(3, 600, step)
        stats = me.engine.stats()
        assert 0 < stats["mailed_bytes"] <= stats["control_bytes"]
        if me.rank == 0:  # whose answers of a cycle are one message
            assert stats["mailed_bytes"] < stats["control_bytes"]
        assert stats["wire_bytes"] >= stats["control_bytes"]
        return True

    assert on_ranks(3, program, ranks_per_node=3, cycle_time_s=0.2) == [True] * 3


def test_a_message_as_large_as_a_mailbox():
    """Sizes around those of one line, of all lines, and of a frame."""

    def program(me):
        for size in (1, 6, 18, 19, 20, 21, 74, 1023, 1024):
            assert reduce_all(me, ["n" * size], size) == expected(2, 1, size)
        for count in (6, 7, 8, 60, 70):  # of names of 1000 bytes, in one message or several
            names = [f"{count}.{i}." + "n" * 990 for i in range(count)]
            assert reduce_all(me, names, count) == expected(2, count, count)
        return True

    assert on_ranks(2, program, ranks_per_node=2) == [True] * 2


def test_mail_goes_on_after_many_rounds():
    def program(me):
        for step in range(2000):  # each takes a line: many times round the ring
            x = np.full(1, me.rank + step, np.float32)
            me.allreduce("w", x).wait()
            assert x[0] == 1 + 2 * step
        stats = me.engine.stats()
        return stats["mailed_bytes"] > MAILBOX

    assert on_ranks(2, program, ranks_per_node=2) == [True] * 2
