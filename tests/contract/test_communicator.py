"""What direct calls of the collectives promise over MPI, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from qsgd_hpc import _core, env
from qsgd_hpc.runtime import direct, mpi_binding

HERE = tuple(name for name in env.ALGORITHMS if not name.startswith(("hierarchical", "leaders")))
EXACT = tuple(name for name in HERE if name not in env.COMPRESSED)
COMPRESSED = ("auto", *(name for name in HERE if name in env.COMPRESSED))
SIZES = (0, 1, 1000, 300_001)


@pytest.fixture(scope="module")
def world():
    with direct.communicator() as c:
        yield c


def values(rank, n, dtype="float32"):
    return np.random.default_rng(rank).integers(0, 5, n).astype(dtype)


def total(size, n, dtype="float32"):
    return np.sum([values(r, n, "float64") for r in range(size)], axis=0).astype(dtype)


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("algorithm", EXACT)
def test_every_exact_algorithm_sums_on_all_ranks(world, algorithm, dtype):
    for n in SIZES:
        x = values(world.rank, n, dtype)
        report = world.allreduce([x], algorithm=algorithm)
        assert np.array_equal(x, total(world.size, n, dtype))
        assert report["result_finite"]


@pytest.mark.parametrize("algorithm", COMPRESSED)
def test_every_compressed_algorithm_leaves_equal_bytes(world, algorithm):
    for n in SIZES:
        x = values(world.rank, n)
        world.allreduce([x], coding=_core.CodecSpec(bits=8), algorithm=algorithm)
        assert np.abs(x - total(world.size, n)).sum() <= 0.05 * n * world.size**2
        assert len(set(world.comm.allgather(x.tobytes()))) == 1


def test_shared_memory_sends_no_messages(world):
    x = values(world.rank, 300_001)
    report = world.allreduce([x])
    assert report["wire_bytes"] == report["shared_memory_bytes"]
    if world.size == 2:
        assert report["wire_bytes"] == x.nbytes


def test_ranks_that_share_no_memory_give_the_same_bits(world):
    rng = np.random.default_rng(world.rank)
    data = rng.standard_normal(200_000).astype(np.float32)
    through_memory, by_message = data.copy(), data.copy()
    world.allreduce([through_memory])
    with direct.communicator(shared=False) as other:
        report = other.allreduce([by_message])
    assert by_message.tobytes() == through_memory.tobytes()
    assert (report["wire_bytes"] > 0) == (world.size > 1)
    assert report["shared_memory_bytes"] == 0


def test_a_split_communicator_reduces_by_itself(world):
    colour = world.rank % 2
    part = world.comm.Split(colour, key=-world.rank)
    with direct.communicator(part) as c:
        for algorithm in EXACT:
            x = np.full(50_000, world.rank, np.float32)
            c.allreduce([x], algorithm=algorithm)
            assert (x == sum(r for r in range(world.size) if r % 2 == colour)).all()
    part.Free()


@pytest.mark.parametrize("per_node", [1, 2, 3])
def test_simulated_nodes_agree_with_one(world, per_node, monkeypatch):
    monkeypatch.setenv("QSGD_RANKS_PER_NODE", str(per_node))
    with direct.communicator() as c:
        nodes = -(-world.size // per_node)
        for n in SIZES:
            for algorithm in ("auto", "hierarchical", "leaders"):
                x = values(world.rank, n)
                c.allreduce([x], algorithm=algorithm)
                assert np.array_equal(x, total(world.size, n))
        coding = _core.CodecSpec(bits=8)
        for algorithm in ("hierarchical_sra", "leaders_sra"):
            x = values(world.rank, 512 * 100)
            report = c.allreduce([x], coding=coding, algorithm=algorithm)
            assert np.abs(x - total(world.size, x.size)).max() < 0.5 * world.size
            assert len(set(world.comm.allgather(x.tobytes()))) == 1
            sent = sum(world.comm.allgather(report["wire_bytes"] - report["shared_memory_bytes"]))
            if nodes > 1:  # alone it is SRA among the node's ranks
                assert sent <= 2 * (nodes - 1) * (coding.bytes(x.size) + 32 * 8 * world.size)


def test_broadcast_gather_scatter_and_exchange(world):
    size, rank = world.size, world.rank
    for n in SIZES:
        x = values(rank, n, "int32")
        world.broadcast(x, root=size - 1)
        assert np.array_equal(x, values(size - 1, n, "int32"))
    counts = [1000 * r for r in range(size)]
    gathered = np.empty(sum(counts), np.int32)
    world.allgatherv(np.full(counts[rank], rank, np.int32), gathered, counts=counts)
    assert np.array_equal(gathered, np.repeat(np.arange(size, dtype=np.int32), counts))
    part = np.empty(counts[rank], np.float32)
    world.reducescatter(np.ones(sum(counts), np.float32), part, counts=counts, op="average")
    assert (part == 1).all()
    received = np.empty(size, np.int64)
    world.alltoallv(np.arange(size) + 10 * rank, [1] * size, received, [1] * size)
    assert received.tolist() == [10 * r + rank for r in range(size)]
    world.barrier()


def test_without_room_for_shared_memory_messages_serve(world, monkeypatch):
    def full(mpi, comm, ranks_per_node):
        monkeypatch.setattr(_core, "REGION_BYTES", 1 << 60)
        return real(mpi, comm, ranks_per_node)

    real = mpi_binding.share_node
    monkeypatch.setattr(mpi_binding, "share_node", full)
    with direct.communicator() as c:
        x = values(world.rank, 1000)
        c.allreduce([x])
        assert np.array_equal(x, total(world.size, 1000))
