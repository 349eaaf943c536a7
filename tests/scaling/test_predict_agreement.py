"""The simulated agreement beside the engine's tree, its messages, and times worked out by hand."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.scaling.predict.agreement import (
    AWAKE_S,
    FIRST_NAP_S,
    FRAME_S,
    GROWING,
    RELAY_NAP_S,
    RELAY_SHARE,
    TENSOR_S,
    agreement,
    arrivals,
    parents,
    simulate,
)
from qsgd_hpc.scaling.predict.fabric import Fabric
from qsgd_hpc.scaling.predict.schedules import Layout
from tests.engine.ranks import on_ranks

ACROSS_S, WITHIN_S = 2e-6, 0.5e-6
FABRIC = Fabric("by hand", 1, 25e9, ACROSS_S, WITHIN_S, 200e9)
READ_S = FRAME_S + TENSOR_S
CSRC = Path(__file__).parents[2] / "csrc"
NAPS = ("transport/transport.cc", "engine/engine_loop.cc")
CONSTANT = (
    r" k(?:Spinning|Yielding|Growing|FirstNap|RelayNap|RelayShare)"
    r"(?:\{| = (?:std::chrono::microseconds\()?)([\d']+)"
)


@pytest.mark.parametrize("fan_out", (0, 1, 2, 8, 40))
@pytest.mark.parametrize("per_node", (1, 3, 4, 8, 26, 100))
def test_the_tree_is_the_engine_s(per_node, fan_out):
    for nodes in (1, 2, 5, 11, 12, 33, 34, 80):
        layout = Layout(nodes * per_node, per_node)
        if layout.ranks > 350:
            continue
        ranks = np.arange(layout.ranks)
        of_nodes = ranks.reshape(nodes, per_node).tolist()
        core = [_core.Tree(r, layout.ranks, of_nodes, fan_out).parent for r in ranks.tolist()]
        assert parents(layout, fan_out).tolist() == [0, *core[1:]]


@pytest.mark.parametrize(
    ("size", "per_node", "fan_out"),
    [
        (12, 4, 1),
        pytest.param(16, None, 0, marks=pytest.mark.full),
        pytest.param(64, 4, 0, marks=pytest.mark.full),
        pytest.param(256, None, 0, marks=pytest.mark.full),
    ],
)
def test_rank_0_hears_as_many_messages_of_the_engine(size, per_node, fan_out):
    steps = 3
    together = threading.Barrier(size)
    operations = [
        _core.Operation(kind="allreduce", name=f"t{i}", shape=[1], dtype="float32", lasting=True)
        for i in range(9)
    ]

    def program(me):
        counts = []
        for step in range(2 + steps):
            xs = [np.ones(1, np.float32) for _ in operations]
            work = zip(operations, xs, strict=True)
            for handle in me.engine.start_all(
                [(what, x.ctypes.data, x.ctypes.data, x, -1, 0) for what, x in work]
            ):
                handle.wait()
            together.wait()  # nothing is under way while messages are counted
            if step in (1, 1 + steps):
                counts.append(me.engine.stats()["messages_heard"])
            together.wait()
        return counts[1] - counts[0]

    layout = Layout(size, per_node or 1)
    tree = parents(layout, fan_out)
    expected = simulate(tree, layout, FABRIC, 9, arrivals(layout)).root_messages
    heard = on_ranks(size, program, ranks_per_node=per_node, fan_out=fan_out)
    assert heard[0] == steps * expected


def test_a_star_by_hand():
    found = agreement(Layout(5), FABRIC, 1)
    there = FRAME_S + ACROSS_S + 4 * READ_S
    back = 4 * FRAME_S + ACROSS_S + READ_S
    assert (found.root_messages, found.depth) == (4, 1)
    assert found.seconds == pytest.approx(there + back)


def test_a_chain_of_nodes_by_hand():
    layout = Layout(6, 2)
    found = simulate(parents(layout, 1), layout, FABRIC, 1, arrivals(layout))
    # The last node's leader hears its other rank, then tells the one before it, which hears two.
    there = 3 * FRAME_S + WITHIN_S + 2 * ACROSS_S + 3 * READ_S
    # Each tells its own node first.
    back = 2 * (2 * FRAME_S + ACROSS_S + READ_S) + FRAME_S + WITHIN_S + READ_S
    assert (found.root_messages, found.depth) == (2, 3)
    assert found.seconds == pytest.approx(there + back)


def test_ranks_sleep_as_the_engine_s_do():
    said = " ".join((CSRC / file).read_text("utf-8") for file in NAPS)
    values = [int(value.replace("'", "")) for value in re.findall(CONSTANT, said)]
    spinning, yielding, growing, first_us, relay_ns, relay_share = values
    assert (spinning + yielding) * 1e-6 == pytest.approx(AWAKE_S)
    assert (growing, first_us * 1e-6) == (GROWING, pytest.approx(FIRST_NAP_S))
    assert relay_ns * 1e-9 == pytest.approx(RELAY_NAP_S)
    assert 1 / relay_share == pytest.approx(RELAY_SHARE)


def test_one_rank_agrees_with_itself_at_once():
    assert agreement(Layout(1), FABRIC, 10).seconds == 0


def test_who_waits_for_a_late_rank_sleeps_for_a_part_of_the_wait():
    layout = Layout(40)
    awake_s = agreement(layout, FABRIC, 1).seconds

    def seconds(late_s):
        ready_s = np.zeros((1, 40))
        ready_s[0, 39] = late_s  # below rank 4, which is below rank 0
        return simulate(parents(layout), layout, FABRIC, 1, ready_s).seconds

    assert seconds(AWAKE_S / 2) < awake_s
    for late_s in np.linspace(1e-3, 4e-2, 40):
        relays, leaf = 3 * RELAY_NAP_S, min(0.2 * late_s, 2.8e-3)
        assert awake_s / 2 < seconds(late_s) < awake_s + relays + leaf
    assert max(map(seconds, np.linspace(1e-2, 4e-2, 40))) > 2.8e-3


@pytest.mark.parametrize("spread_s", (0.0, 1e-3))
def test_a_tree_agrees_sooner_than_a_star_from_some_size_on(spread_s):
    def seconds(ranks, star):
        layout = Layout(ranks, 4)
        tree = np.zeros(ranks, int) if star else parents(layout)
        return simulate(tree, layout, FABRIC, 100, arrivals(layout, spread_s)).seconds

    assert seconds(2048, star=False) < seconds(2048, star=True) / 4
    assert seconds(2048, star=False) < 2 * seconds(512, star=False)
