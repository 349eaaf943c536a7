"""The schedules that predictions rest on, beside what the core sends among threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.env import COMPRESSED
from qsgd_hpc.errors import UsageError
from qsgd_hpc.scaling.predict.schedules import ALGORITHMS, Coding, Layout, resolve, schedule

LISTS = {
    "small": [(100, 3), (7, 11)],
    "middle": [(12_000, 8)],
    "one": [(70_001, 5)],
    "fused": [(40_000, 17), (0, 4), (511, 22), (33_333, 39)],
}
ACROSS = ("hierarchical", "leaders", "hierarchical_sra", "leaders_sra")
FLAT = tuple(name for name in ALGORITHMS if name not in ("shared", *ACROSS))


def core_bytes(algorithm, layout, tensors, coding):
    """Return (bytes in messages, bytes through memory) of each rank, as the core counts them."""
    world = _core.ThreadWorld(layout.ranks)
    spec = None if coding is None else _core.CodecSpec(bits=coding.bits, bucket_size=coding.bucket)

    def run(rank):
        needs_node = algorithm in ("shared", *ACROSS)
        own = _core.Communicator.over_threads(world, rank, layout.per_node if needs_node else None)
        arrays = [np.ones(count, np.float32) for count, _ in tensors]
        report = own.allreduce(
            arrays, coding=spec, algorithm=algorithm, ids=[name for _, name in tensors]
        )
        in_memory = report["shared_memory_bytes"]
        return report["wire_bytes"] - in_memory, in_memory

    with ThreadPoolExecutor(layout.ranks) as pool:
        return list(pool.map(run, range(layout.ranks)))


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("algorithm", FLAT)
@pytest.mark.parametrize("ranks", (2, 3, 4, 8, 18))
def test_every_rank_sends_what_the_core_sends(ranks, algorithm, name):
    layout, tensors = Layout(ranks), LISTS[name]
    coding = Coding(4) if algorithm in COMPRESSED else None
    ours = schedule(algorithm, layout, tensors, coding).sent()
    assert ours.tolist() == [sent for sent, _ in core_bytes(algorithm, layout, tensors, coding)]


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("bits", (None, 8, 4))
@pytest.mark.parametrize("kind", ("hierarchical", "leaders"))
@pytest.mark.parametrize(("ranks", "per_node"), ((4, 2), (8, 4), (6, 2), (6, 3)))
def test_nodes_exchange_what_the_core_exchanges(ranks, per_node, kind, bits, name):
    layout, tensors = Layout(ranks, per_node), LISTS[name]
    coding = None if bits is None else Coding(bits)
    algorithm = f"{kind}_sra" if coding else kind
    ours = schedule(algorithm, layout, tensors, coding)
    core = core_bytes(algorithm, layout, tensors, coding)
    assert ours.sent().tolist() == [sent for sent, _ in core]
    assert ours.memory_bytes.tolist() == [given for _, given in core]


@pytest.mark.parametrize("bits", (None, 4))
def test_many_nodes_exchange_what_the_core_exchanges(bits):
    layout, tensors = Layout(132, 2), LISTS["fused"]
    coding = None if bits is None else Coding(bits)
    ours = schedule("auto", layout, tensors, coding)
    core = core_bytes(ours.algorithm, layout, tensors, coding)
    assert ours.sent().tolist() == [sent for sent, _ in core]


@pytest.mark.parametrize("ranks", (2, 4))
def test_one_node_hands_over_what_the_core_does(ranks):
    for tensors in LISTS.values():
        ours = schedule("shared", Layout(ranks, ranks), tensors)
        core = core_bytes("shared", Layout(ranks, ranks), tensors, None)
        given = sum(given for _, given in core)
        assert ours.memory_bytes.sum() == pytest.approx(given, abs=4 * ranks)
        assert ours.sent().sum() == 0


@pytest.mark.parametrize(
    ("layout", "bits", "expected"),
    [
        (Layout(4), None, "direct"),
        (Layout(4), 8, "sra"),
        (Layout(128), 8, "sra2d"),
        (Layout(4, 4), None, "shared"),
        (Layout(8, 4), None, "hierarchical"),
        (Layout(512, 4), 8, "hierarchical_sra"),
    ],
)
def test_auto_is_what_the_core_takes(layout, bits, expected):
    assert resolve("auto", layout, Coding(bits) if bits else None) == expected


def test_an_unknown_algorithm_is_answered_with_the_known_ones():
    with pytest.raises(UsageError, match="known are auto, direct, ring"):
        schedule("rign", Layout(2), [(10, 0)])
    with pytest.raises(UsageError, match="sends float32"):
        schedule("ring", Layout(2), [(10, 0)], Coding(8))
    with pytest.raises(UsageError, match="'shared' is for ranks of one node"):
        schedule("shared", Layout(8, 4), [(10, 0)])
