"""Tensors on devices that are not coded, carried by NCCL; here by its twin, over the kernels'."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import NonFiniteGradientError, RankFailedError
from tests.engine.ranks import Rank, device_output, on_ranks, output
from tests.gpu.memory import HostMemory
from tests.gpu.order import Order
from tests.gpu.twin import Kernels

SHAPES = ((5000,), (3, 7), (1,), (0,), (40_003,))
NEAREST = _core.CodecSpec(bits=2, rounding="nearest", bucket_size=64)


def values(rank, i, dtype="float32"):
    draw = np.random.default_rng([rank, i])
    return draw.integers(-4, 5, SHAPES[i]).astype(dtype)  # whose sums are exact


def run(twin, size, program, **config):
    given = {"gpu_library": str(twin), "nccl_library": str(twin), **config}
    results = on_ranks(size, program, **given)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@contextlib.contextmanager
def collectives(twin, *, at_least=0, exactly=None):
    """Require that the ranks' devices, which are all in this process, begin so many in the block.

    That the ranks have come this far together is up to the caller.
    """
    kernels = Kernels(twin, HostMemory())
    before = kernels.collectives()
    yield
    begun = kernels.collectives() - before
    assert begun == exactly if exactly is not None else begun >= at_least


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int8", "int64"])
@pytest.mark.parametrize(
    ("op", "factors"),
    [
        ("sum", {}), ("average", {}), ("product", {}), ("sum", {"prescale": 2.0}),
        ("average", {"postscale": 4.0}),
    ],
)  # fmt: skip
def test_reductions_have_the_results_of_the_host(twin, dtype, op, factors):
    def program(me):
        results = []
        for device in (0, -1):
            xs = [values(me.rank, i, dtype) for i in range(len(SHAPES))]
            handles = [
                me.allreduce(f"{device}.{i}", x, op, device=device, **factors)
                for i, x in enumerate(xs)
            ]
            for handle in handles:
                handle.wait()
            results.append(xs)
        return results

    with collectives(twin, at_least=3):
        results = run(twin, 3, program)
    for device, host in results:
        for mine, its in zip(device, host, strict=True):
            np.testing.assert_array_equal(mine, its)


def test_what_they_carry_is_counted(twin):
    """As a ring's, which hands on two thirds of a tensor twice."""

    def program(me):
        counted = []
        for device in (-1, 0):
            me.allreduce(f"w{device}", np.zeros(9, dtype=np.float32), device=device).wait()
            before = me.engine.stats()
            me.allreduce(f"x{device}", np.zeros(30_000, dtype=np.float32), device=device).wait()
            after = me.engine.stats()
            sent, control = (after[k] - before[k] for k in ("wire_bytes", "control_bytes"))
            counted.append(sent - control)
        return counted

    for host, device in run(twin, 3, program, algorithm="ring"):
        assert device == 160_000
        assert host == pytest.approx(device, rel=0.01)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_large_tensor_is_reduced_where_it_lies(twin, size):
    def program(me):
        x = np.arange(100_000, dtype=np.float32) + me.rank
        me.allreduce("w", x, "average", device=0).wait()
        return x

    for result in run(twin, size, program):
        np.testing.assert_array_equal(result, np.arange(100_000, dtype=np.float32) + (size - 1) / 2)


def test_what_nccl_cannot_do_goes_through_the_host(twin):
    """Its minimum of floats would lose NaN, and it has no integers of 16 bits."""

    def program(me):
        x = np.array([me.rank, np.nan if me.rank == 1 else 3], dtype=np.float32)
        most = np.array([me.rank, 5], dtype=np.int32)
        short = np.array([me.rank, 7], dtype=np.int16)
        me.allreduce("x", x, "min", device=0).wait()
        me.allreduce("most", most, "max", device=0).wait()
        me.allreduce("short", short, device=0).wait()
        return x, most, short

    for x, most, short in run(twin, 3, program):
        np.testing.assert_array_equal(x, [0, np.nan])
        np.testing.assert_array_equal(most, [2, 5])
        np.testing.assert_array_equal(short, [3, 21])


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast(twin, root):
    def program(me):
        xs = [values(me.rank, i) for i in range(len(SHAPES))]
        handles = [me.broadcast(f"b{i}", x, root, device=0) for i, x in enumerate(xs)]
        for handle in handles:
            handle.wait()
        return xs

    with collectives(twin, exactly=3 * 4):  # not for the empty one
        results = run(twin, 3, program)
    for xs in results:
        for i, x in enumerate(xs):
            np.testing.assert_array_equal(x, values(root, i))


def test_ranks_that_have_the_tensor_elsewhere_take_all_to_the_host(twin):
    def program(me):
        device = -1 if me.rank == 1 else 0
        x = np.full(50_000, me.rank + 1.0, dtype=np.float32)
        me.allreduce("w", x, device=device).wait()
        y = np.full(50_000, me.rank + 1.0, dtype=np.float32)
        me.allreduce("w", y, device=0).wait()  # the same name, now on all of them
        return x, y

    with collectives(twin, exactly=3):
        results = run(twin, 3, program)
    for x, y in results:
        np.testing.assert_array_equal(x, 6)
        np.testing.assert_array_equal(y, 6)


EQUAL = [4, 4, 4]
UNEVEN = [2, 0, 5]


def gathered(me, x, splits, device, **more):
    """Results of the three collectives whose results the core allocates, and the numbers of rows.

    Args:
        x: of ``sum(splits)`` rows, and not fewer than the ranks.
    """
    taken = device_output if device >= 0 else output
    part = x[: splits[me.rank]]
    name = f"{device}.{splits}.{x.dtype}"
    handles = [
        me.allgather(f"g{name}", part, device=device, **more),
        me.alltoall(f"t{name}", x, splits, device=device, **more),
        me.reducescatter(f"s{name}", x, device=device, **more),
    ]
    return [(taken(h, x.dtype), h.sizes()) for h in handles]


@pytest.mark.parametrize("splits", [EQUAL, UNEVEN])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64"])
def test_gathers_have_the_results_of_the_host(twin, splits, dtype):
    def program(me):
        draw = np.random.default_rng(me.rank)
        x = draw.integers(-4, 5, (sum(splits), 3)).astype(dtype)
        return [gathered(me, x, splits, device) for device in (0, -1)]

    with collectives(twin, exactly=3 * (3 if splits is EQUAL else 4)):
        results = run(twin, 3, program)
    for device, host in results:
        for (mine, rows), (its, its_rows) in zip(device, host, strict=True):
            np.testing.assert_array_equal(mine, its)
            assert rows == its_rows


@pytest.mark.parametrize(
    ("op", "factors"),
    [("average", {}), ("product", {}), ("sum", {"prescale": 2.0}), ("average", {"postscale": 4.0})],
)
@pytest.mark.parametrize("rows", [6, 7])
def test_reducescatter_scales_as_the_host_does(twin, rows, op, factors):
    def program(me):
        x = np.random.default_rng(me.rank).integers(-4, 5, (rows, 5)).astype(np.float32)
        device = device_output(me.reducescatter("d", x, op, device=0, **factors), x.dtype)
        return device, output(me.reducescatter("h", x, op, **factors), x.dtype)

    with collectives(twin, exactly=3):
        results = run(twin, 3, program)
    for device, host in results:
        np.testing.assert_array_equal(device, host)


def test_empty_gathers(twin):
    def program(me):
        x = np.zeros((0, 3), np.float32)
        return gathered(me, x, [0, 0, 0], 0)

    with collectives(twin, exactly=0):
        results = run(twin, 3, program)
    for result in results:
        assert [(made.shape, rows) for made, rows in result] == [
            ((0, 3), [0, 0, 0]), ((0, 3), [0, 0, 0]), ((0, 3), []),
        ]  # fmt: skip


@pytest.mark.parametrize("library", ["", "twin"])
def test_gathers_on_a_second_device_and_without_nccl(twin, library):
    def program(me):
        me.allreduce("w", np.zeros(10, np.float32), device=0).wait()  # the communicator's device
        x = np.arange(14, dtype=np.float32).reshape(7, 2) + me.rank
        return gathered(me, x, UNEVEN, 1), gathered(me, x, UNEVEN, -1)

    for device, host in run(twin, 3, program, nccl_library=library and str(twin)):
        for (mine, rows), (its, its_rows) in zip(device, host, strict=True):
            np.testing.assert_array_equal(mine, its)
            assert rows == its_rows


def test_gathers_of_ranks_of_which_one_has_its_tensor_on_the_host(twin):
    def program(me):
        x = np.full((me.rank, 2), me.rank, dtype=np.float32)
        on_host = me.rank == 1
        handle = me.allgather("x", x, device=-1 if on_host else 0)
        return (output if on_host else device_output)(handle, x.dtype)

    with collectives(twin, exactly=0):
        results = run(twin, 3, program)
    for made in results:
        np.testing.assert_array_equal(made, [[1, 1], [2, 2], [2, 2]])


def test_a_result_outlives_the_engine(twin):
    def program(me):
        handle = me.allgather("x", np.full(5, me.rank, np.float32), device=0)
        handle.wait()
        me.engine.shutdown("it ends")
        return handle

    for handle in run(twin, 2, program):
        np.testing.assert_array_equal(
            device_output(handle, np.float32), np.repeat(np.arange(2, dtype=np.float32), 5)
        )


def test_a_result_that_is_copied_when_the_job_ends_is_kept(twin):
    order = Order(Kernels(twin, HostMemory()))
    stream = order.stream()
    given = {"gpu_library": str(twin), "nccl_library": str(twin)}
    me = Rank(_core.ThreadWorld(1), 0, **given)
    x, made = np.arange(50_000, dtype=np.float32), np.zeros(50_000, np.float32)
    handle = me.allgather("x", x, device=0)
    handle.wait()
    me.engine.abort("it ends")
    try:
        with order.late(stream):
            with pytest.raises(RankFailedError, match="it ends"):
                handle.copy_output(made.ctypes.data, stream)
            me.engine.shutdown("the test ended")
            del me, handle  # and with them the device
        order.finish(stream)
    finally:
        order.end()
    np.testing.assert_array_equal(made, x)


@pytest.mark.parametrize("library", ["", "twin"])
def test_results_of_growing_size_reuse_memory(twin, library):
    kernels = Kernels(twin, HostMemory())
    before = kernels.allocated()

    def program(me):
        for rows in range(1, 41):
            x = np.ones((rows, 10_000), np.float32)
            device_output(me.allgather("x", x, device=0), x.dtype)
        return kernels.allocated() - before

    largest = 2 * 40 * 40_000
    assert max(run(twin, 2, program, nccl_library=library and str(twin))) < 10 * largest


def test_two_devices_of_one_rank(twin):
    """A communicator has one of them; what is on the other is copied."""

    def program(me):
        xs = [np.full(3000, me.rank + i, dtype=np.float32) for i in range(4)]
        handles = [me.allreduce(f"w{i}", x, device=i % 2) for i, x in enumerate(xs)]
        for handle in handles:
            handle.wait()
        y = np.full(10, me.rank, dtype=np.float32)
        me.broadcast("y", y, 1, device=1).wait()
        return [*xs, y]

    for *xs, y in run(twin, 2, program):
        for i, x in enumerate(xs):
            np.testing.assert_array_equal(x, 2 * i + 1)
        np.testing.assert_array_equal(y, 1)


def test_a_process_set_without_rank_0(twin):
    def program(me):
        added = me.add_process_set([1, 2])
        added.wait()
        number = added.result()
        if me.rank == 0:
            return None
        x = np.full(50_000, me.rank, dtype=np.float32)
        me.allreduce("w", x, process_set=number, device=0).wait()
        me.broadcast("b", x[:9], root=2, process_set=number, device=0).wait()
        return x

    with collectives(twin, exactly=4):
        _, *others = run(twin, 3, program)
    for x in others:
        np.testing.assert_array_equal(x, 3)


def test_a_rank_that_has_joined_brings_zeros(twin):
    def program(me):
        def step(name):
            x = np.full(5000, me.rank + 1, dtype=np.float32)
            me.allreduce(name, x, device=0).wait()
            return x

        results = [step("a")]
        if me.rank != 2:
            results.append(step("b"))
        me.join().wait()
        return results

    for rank, (all_of_them, *rest) in enumerate(run(twin, 3, program)):
        np.testing.assert_array_equal(all_of_them, 6)
        if rank != 2:
            np.testing.assert_array_equal(rest[0], 3)


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("others", [0, 3])
def test_nan_is_named_with_tensor_and_rank(twin, guilty, others):
    def program(me):
        x = np.ones(9000, dtype=np.float32)
        if me.rank == guilty:
            x[-1] = np.nan
        fine = [np.ones(100, dtype=np.float32) for _ in range(others)]
        handles = [
            me.allreduce(name, tensor, "average", check_finite=True, device=0)
            for name, tensor in [*((f"fine{i}", y) for i, y in enumerate(fine)), ("w", x)]
        ]
        *rest, last = handles
        for handle in rest:
            handle.wait()
        with pytest.raises(NonFiniteGradientError) as caught:
            last.wait()
        return str(caught.value)

    for message in run(twin, 2, program):
        assert (
            f"tensor 'w' holds NaN or Inf after allreduce; the values came from rank(s) {guilty}"
            in message
        )


def test_what_codes_owe_is_paid_when_they_end(twin):
    """The last step is not coded: then nothing is owed, and the sum of all is the gradients'."""

    def program(me):
        total = np.zeros(3000)
        for step in range(3):
            x = np.random.default_rng([me.rank, step]).standard_normal(3000).astype(np.float32)
            coding = NEAREST if step < 2 else None
            more = {"error_feedback": True} if coding else {}
            me.allreduce("w", x, "average", coding, device=0, **more).wait()
            total += x
        return total

    each = [
        np.random.default_rng([r, s]).standard_normal(3000).astype(np.float32)
        for r in range(3)
        for s in range(3)
    ]
    for total in run(twin, 3, program):
        np.testing.assert_allclose(total, np.sum(each, axis=0) / 3, atol=1e-4)


def in_nodes(twin, place, algorithm, *, feedback=False, size=4, dtype="float32", **config):
    """Return the averages of some steps of a job with two ranks to a node, and what is owed."""

    def program(me):
        results = []
        for step in range(3):
            draws = np.random.default_rng([me.rank, step])
            xs = [draws.standard_normal(shape).astype(dtype) for shape in SHAPES]
            handles = [
                me.allreduce(f"t{i}", x, "average", NEAREST, error_feedback=feedback,
                             device=place(me.rank))
                for i, x in enumerate(xs)
            ]  # fmt: skip
            for handle in handles:
                handle.wait()
            results += xs
        owed = [me.engine.owed_share(name) for name in sorted(me.engine.owed_counts())]
        return results, owed

    given = {"ranks_per_node": 2, "algorithm": algorithm, **config}
    results = run(twin, size, program, **given)
    for mine, _ in results:
        for x, first in zip(mine, results[0][0], strict=True):
            np.testing.assert_array_equal(x, first)
    return results


@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "feedback"])
@pytest.mark.parametrize("algorithm", ["auto", "leaders_sra"])
@pytest.mark.parametrize("size", [3, 4, 6])
def test_devices_sum_in_their_node_what_is_coded_between_nodes(twin, size, algorithm, feedback):
    """As the host does in a node's memory: with two ranks to a node, in the same order."""

    def of(device):
        return in_nodes(twin, lambda _: device, algorithm, size=size, feedback=feedback)

    with collectives(twin, at_least=2 * size):
        device = of(0)
    with collectives(twin, exactly=0):
        host = of(-1)
    for (mine, owed), (its, its_owed) in zip(device, host, strict=True):
        for x, other in zip([*mine, *owed], [*its, *its_owed], strict=True):
            np.testing.assert_allclose(x, other, rtol=1e-6, atol=1e-7)
        assert bool(owed) == feedback


def test_a_node_s_devices_that_cannot_leave_it_to_codes_among_all_ranks(twin, monkeypatch):
    """The first reduction goes through the node's memory; then rank 0 knows."""
    monkeypatch.setenv("TWIN_SHARED", "1")
    said = []
    results = in_nodes(twin, lambda _: 0, "auto", log=said.append)
    assert len(results) == 4
    assert len(said) == 2, "the first rank of each node says it"
    assert all("shares GPU" in line for line in said)


@pytest.mark.parametrize("without", [0, 1])
def test_a_node_with_nccl_and_one_without_understand_each_other(twin, without):
    """The one without sums in its memory, in messages as long as the other's."""
    count = 1_400_000  # several messages on the host

    def average(device, **config):
        def program(me):
            x = np.random.default_rng(me.rank).standard_normal(count).astype(np.float32)
            me.allreduce("w", x, "average", NEAREST, device=device).wait()
            return x

        given = {"ranks_per_node": 2, "algorithm": "hierarchical_sra", "log": said.append}
        return run(twin, 4, program, **given, **config)

    def of_rank(rank):
        return {"nccl_library": "/nowhere"} if rank // 2 == without else {}

    said = []
    host = average(-1)
    assert said == []
    mixed = average(0, of_rank=of_rank)
    (line,) = said
    assert f"rank {2 * without}: /nowhere" in line
    for x in mixed:
        np.testing.assert_array_equal(x, mixed[0])
        np.testing.assert_allclose(x, host[0], rtol=1e-6, atol=1e-7)


def test_nan_in_a_node_is_named_with_its_rank(twin):
    def program(me):
        x = np.ones(9000, dtype=np.float32)
        if me.rank == 3:
            x[5000] = np.inf
        fine = me.allreduce("fine", np.ones(100, dtype=np.float32), "sum", NEAREST, True, device=0)
        handle = me.allreduce("w", x, "average", NEAREST, check_finite=True, device=0)
        fine.wait()
        with pytest.raises(NonFiniteGradientError, match=r"tensor 'w' .* from rank\(s\) 3"):
            handle.wait()

    run(twin, 4, program, ranks_per_node=2)


@pytest.mark.parametrize("reason", ["shared", "absent"])
def test_without_nccl_all_goes_through_the_host_and_rank_0_says_why(twin, reason, monkeypatch):
    said = []
    library = str(twin)
    if reason == "shared":
        monkeypatch.setenv("TWIN_SHARED", "1")
    else:
        library = "/nowhere/libnccl.so.2"

    def program(me):
        for step in range(3):
            x = np.full(5000, me.rank + step, dtype=np.float32)
            me.allreduce("w", x, device=0).wait()
            np.testing.assert_array_equal(x, 2 * step + 1)

    run(twin, 2, program, nccl_library=library, log=said.append)
    (line,) = said
    expected = {
        "shared": "rank 1 shares GPU 0:0 of host",
        "absent": "rank 0: /nowhere/libnccl.so.2: cannot open shared object file",
    }
    assert expected[reason] in line
    assert line.startswith("NCCL does not carry tensors on GPUs: ")
    assert line.endswith("QSGD_NCCL=none hides this warning")


def test_an_end_of_the_job_ends_what_waits_for_the_device(twin):
    kernels = Kernels(twin, HostMemory())

    def program(me):
        x = np.ones(1000, dtype=np.float32)
        me.allreduce("first", x, device=0).wait()  # the communicator is there
        together.wait(20)
        handle = me.allreduce("w", np.ones(1000, dtype=np.float32), device=0)
        assert not handle.done()
        together.wait(20)
        if me.rank == 0:
            me.engine.abort("the job is over")
        with pytest.raises(RankFailedError, match="the job is over"):
            handle.wait()
        together.wait(20)

    # Nothing begins on any device from the second tensor on, until both have failed.
    held = iter([True, True, False])
    together = threading.Barrier(2, action=lambda: kernels.hold(None, next(held)))
    run(twin, 2, program)
