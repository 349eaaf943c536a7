"""The tree in which ranks agree: who speaks with whom, and what rank 0 hears."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import HorovodInternalError, RankFailedError
from tests.engine.ranks import on_ranks

MOST_CONNECTIONS = 34

LAYOUTS = {
    "alone": (1, None, 0),
    "few": (33, None, 0),
    "few on nodes": (32, [4] * 8, 0),
    "more": (34, None, 0),
    "many": (600, None, 0),
    "a large node": (192, [192], 0),
    "nodes": (64, [4] * 16, 0),
    "large nodes": (512, [128] * 4, 0),
    "uneven": (23, [1, 7, 2, 5, 8], 2),
    "a chain": (7, None, 1),
}


def layout(name: str) -> tuple[int, list[list[int]] | None, int]:
    size, counts, fan_out = LAYOUTS[name]
    if counts is None:
        return size, None, fan_out
    ranks = list(range(size))
    random.Random(0).shuffle(ranks)
    ranks.remove(0)
    ranks.insert(0, 0)
    nodes = []
    for count in counts:
        nodes.append(sorted(ranks[:count]))
        ranks = ranks[count:]
    return size, sorted(nodes), fan_out


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_is_below_rank_0_once_and_near_to_few(name):
    size, nodes, fan_out = layout(name)
    trees = [_core.Tree(rank, size, nodes, fan_out) for rank in range(size)]
    assert trees[0].parent == -1
    for rank, tree in enumerate(trees):
        for place, child in enumerate(tree.children):
            assert trees[child].parent == rank
            theirs = trees[child]
            below = [theirs.below(i) for i in range(len(theirs.children))]
            assert tree.below(place) == sorted([child, *(r for ranks in below for r in ranks)])
        assert len(tree.children) + (rank > 0) <= MOST_CONNECTIONS
    everyone = [r for i in range(len(trees[0].children)) for r in trees[0].below(i)]
    assert sorted(everyone) == list(range(1, size))
    if nodes is not None and size > 33:
        home = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
        crossing = [r for r in range(1, size) if home[trees[r].parent] != home[r]]
        assert len(crossing) == len(nodes) - 1  # a message per node


@pytest.mark.parametrize("name", ["few", "few on nodes"])
def test_a_small_job_is_a_star(name):
    size, nodes, fan_out = layout(name)
    assert _core.Tree(0, size, nodes, fan_out).children == list(range(1, size))


TREES = pytest.mark.parametrize(
    ("ranks_per_node", "fan_out"),
    [
        (4, 2),
        pytest.param(None, 1, marks=pytest.mark.full),
        pytest.param(None, 2, marks=pytest.mark.full),
        pytest.param(3, 1, marks=pytest.mark.full),
    ],
)


@TREES
def test_any_order_in_overlapping_sets(ranks_per_node, fan_out):
    size = 13
    sets = [[1, 2, 12], [3, 4, 5, 6], list(range(0, 13, 2)), [11]]

    def program(me):
        ids = {0: list(range(size))}
        for ranks in sets:
            handle = me.add_process_set(ranks)
            handle.wait()
            ids[handle.result()] = ranks
        order = random.Random(me.rank)
        for step in range(4):
            mine = [(i, n) for i, ranks in ids.items() if me.rank in ranks for n in range(4)]
            order.shuffle(mine)
            work = []
            for i, n in mine:
                rows = me.rank + 1 if n == 2 else 1  # of an allgather, each its own number
                x = np.full(rows, me.rank + step)
                call = me.allgather if n % 2 == 0 else me.allreduce
                work.append((i, n, x, call(f"t{n}", x, process_set=i, lasting=True)))
            for i, n, x, handle in work:
                handle.wait()
                values = [r + step for r in ids[i]]
                counts = [r + 1 if n == 2 else 1 for r in ids[i]]
                if n % 2:
                    assert x.tolist() == [sum(values)]
                else:
                    expected = np.repeat(values, counts).tolist()
                    assert handle.output().view(x.dtype).tolist() == expected
        return True

    results = on_ranks(size, program, ranks_per_node=ranks_per_node, fan_out=fan_out)
    assert results == [True] * size


@TREES
@pytest.mark.parametrize("odd", (0, 1, 12))
def test_a_disagreement_names_both_values_on_every_rank(ranks_per_node, fan_out, odd):
    def program(me):
        me.allreduce("w", np.ones(10 + (me.rank == odd), np.float32)).wait()

    results = on_ranks(13, program, ranks_per_node=ranks_per_node, fan_out=fan_out)
    assert len({str(error) for error in results}) == 1
    for error in results:
        assert isinstance(error, HorovodInternalError)
        assert all(word in str(error) for word in ("[10]", "[11]", f"rank {odd} has", "'w'"))


@TREES
@pytest.mark.parametrize("leaver", (0, 1, 12))
def test_a_rank_that_leaves_is_named_by_all_others(ranks_per_node, fan_out, leaver):
    def program(me):
        if me.rank != leaver:
            me.allreduce("w", np.ones(3, np.float32)).wait()

    results = on_ranks(13, program, ranks_per_node=ranks_per_node, fan_out=fan_out)
    for rank, error in enumerate(results):
        if rank != leaver:
            assert isinstance(error, RankFailedError)
            assert f"rank {leaver} left the job (the test ended)" in str(error)


@TREES
def test_ranks_join_one_after_another(ranks_per_node, fan_out):
    size = 13

    def program(me):
        seen = []
        for _ in range(2 + me.rank % 3):
            x = np.ones(3)
            me.allreduce("w", x).wait()
            seen.append(int(x[0]))
        handle = me.join()
        handle.wait()
        x = np.ones(3)
        me.allreduce("after", x).wait()
        return seen, int(x[0])

    left = [size, size, sum(r % 3 > 0 for r in range(size)), sum(r % 3 > 1 for r in range(size))]
    results = on_ranks(size, program, ranks_per_node=ranks_per_node, fan_out=fan_out)
    for rank, result in enumerate(results):
        assert result == (left[: 2 + rank % 3], size), rank


@TREES
def test_ranks_that_wait_for_one_another_are_named(ranks_per_node, fan_out):
    def program(me):
        me.allreduce("a" if me.rank % 2 else "b", np.ones(3)).wait()

    for error in on_ranks(
        13, program, ranks_per_node=ranks_per_node, fan_out=fan_out, deadlock_s=0.3
    ):
        assert "ranks 1, 3, 5, 7, 9, 11 for 'a', ranks 0, 2, 4, 6, 8, 10, 12 for 'b'" in str(error)


@TREES
def test_a_stall_names_who_is_missing(ranks_per_node, fan_out):
    said: list[str] = []

    def program(me):
        me.barrier("all are here").wait()
        while me.rank in (3, 12) and not said:
            time.sleep(0.01)
        me.allreduce("late", np.ones(3, np.float32)).wait()

    on_ranks(
        13, program, ranks_per_node=ranks_per_node, fan_out=fan_out,
        stall_warning_s=0.3, log=said.append,
    )  # fmt: skip
    assert any("'late' has waited" in line and "ranks 3, 12." in line for line in said), said


@TREES
def test_a_rank_that_is_late_is_waited_for(ranks_per_node, fan_out):
    """Its tensors are told apart from those of the others, which were passed on before."""
    said: list[str] = []

    def program(me):
        for step in range(3):
            if me.rank == 5 + step:
                time.sleep(0.2)
            xs = [np.full(2, me.rank + step) for _ in range(20)]
            handles = [me.allreduce(f"t{i}", x) for i, x in enumerate(xs)]
            for handle in handles:
                handle.wait()
            assert all(x[0] == sum(range(13)) + 13 * step for x in xs)
        return True

    results = on_ranks(
        13, program, ranks_per_node=ranks_per_node, fan_out=fan_out,
        stall_warning_s=0.1, log=said.append,
    )  # fmt: skip
    assert results == [True] * 13
    assert said


@TREES
def test_groups_end_together_and_fail_where_they_differ(ranks_per_node, fan_out):
    def program(me):
        found = []
        for step in range(3):
            names = ["a", "b", "c" if step != 1 or me.rank % 3 else "d"]
            xs = [np.ones(2) for _ in names]
            handles = [
                me.allreduce(name, x, group="g", group_size=3)
                for name, x in zip(names, xs, strict=True)
            ]
            found.append([error_of(handle) for handle in handles])
        return found

    def error_of(handle):
        try:
            handle.wait()
        except HorovodInternalError as error:
            return str(error)

    for first, second, third in on_ranks(
        13, program, ranks_per_node=ranks_per_node, fan_out=fan_out
    ):
        assert first == third == [None] * 3
        assert all("group 'g' of 3 tensors, but not on ranks" in error for error in second)


@pytest.mark.parametrize(
    ("size", "fan_out", "most"),
    [(16, 2, 16), pytest.param(128, 0, 64, marks=pytest.mark.full)],
)
def test_rank_0_hears_few_messages_of_known_tensors(size, fan_out, most):
    operations = [
        _core.Operation(kind="allreduce", name=f"t{i}", shape=[1], dtype="float32", lasting=True)
        for i in range(100)
    ]

    def program(me):
        def step():
            xs = [np.ones(1, np.float32) for _ in operations]
            work = zip(operations, xs, strict=True)
            for handle in me.engine.start_all(
                [(what, x.ctypes.data, x.ctypes.data, x, -1, 0) for what, x in work]
            ):
                handle.wait()

        heard = [me.engine.stats()["messages_heard"]]
        for _ in range(6):
            step()
            heard.append(me.engine.stats()["messages_heard"])
        return np.diff(heard)

    # With other processes on these cores, the operations of a step may arrive in several cycles.
    tries = (min(on_ranks(size, program, fan_out=fan_out)[0][2:]) for _ in range(5))
    assert any(heard <= most for heard in tries)


@pytest.mark.full
@pytest.mark.parametrize("fan_out", (1, 2))
def test_all_that_the_engine_promises_holds_in_a_tree(request, fan_out):
    """The engine's tests are of few ranks, which are a star unless fewer may be below each."""
    tests = sorted(Path(__file__).parent.glob("test_*.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
         *(str(test) for test in tests if test.name != Path(__file__).name)],
        env={**os.environ, "QSGD_TEST_FAN_OUT": str(fan_out)},
        cwd=request.config.rootpath, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
