"""Tensors that a device holds, which here is the kernels' twin: its work is late, as a GPU's is."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import HorovodInternalError, NonFiniteGradientError, UsageError
from tests.engine.ranks import on_ranks, output
from tests.engine.test_planner import FAST
from tests.gpu.memory import HostMemory
from tests.gpu.order import LATE_S, Order
from tests.gpu.twin import Kernels

# Codes without noise, which is another on devices.
NEAREST = _core.CodecSpec(bits=4, rounding="nearest", bucket_size=128)
EDEN = _core.CodecSpec(scheme="eden", bits=3, bucket_size=256)
NOISY = _core.CodecSpec(bits=4)
COUNTS = (5000, 64, 1, 0, 40_003)
EVERYWHERE = {"all": lambda _: 0, "none": lambda _: -1, "even": lambda rank: -(rank % 2)}


def gradients(rank, step, dtype, counts=COUNTS):
    draw = np.random.default_rng([rank, step])
    return [draw.standard_normal(count).astype(dtype) for count in counts]


def same(results):
    """Return what the ranks got, which must be one and the same."""
    for result in results:
        if isinstance(result, Exception):
            raise result
        for mine, first in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(mine, first)
    return results[0]


def reduced(place, twin, size, codings, *, dtype=np.float32, steps=3, feedback=False, **config):
    """Return the averages of some steps, with tensors where ``place`` of the rank says."""

    def program(me):
        results = []
        for step in range(steps):
            xs = gradients(me.rank, step, dtype)
            handles = [
                me.allreduce(
                    f"t{i}", x, "average", codings[i % len(codings)], error_feedback=feedback,
                    device=place(me.rank),
                )
                for i, x in enumerate(xs)
            ]  # fmt: skip
            for handle in handles:
                handle.wait()
            results += xs
        owed = me.engine.owed_counts() if feedback else {}
        return [*results, *(me.engine.owed_share(name) for name in owed if me.rank == 0)]

    got = on_ranks(size, program, gpu_library=str(twin), seed=3, **config)
    owed = got[0][len(COUNTS) * steps :] if feedback else []
    return [*same([each[: len(COUNTS) * steps] for each in got]), *owed]


@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "feedback"])
@pytest.mark.parametrize("algorithm", ["auto", "sra2d", "requantizing_ring", "allgather"])
def test_results_and_what_is_owed_are_those_of_the_host(twin, algorithm, feedback):
    def of(place):
        return reduced(
            EVERYWHERE[place], twin, 4, [NEAREST, EDEN], feedback=feedback, algorithm=algorithm
        )

    host = of("none")
    for place in ("all", "even"):
        for mine, its in zip(of(place), host, strict=True):
            np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_types_give_the_bits_of_the_host(twin, dtype):
    host, device = (
        reduced(EVERYWHERE[place], twin, 2, [NEAREST, EDEN], dtype=dtype, steps=1)
        for place in ("none", "all")
    )
    same([host, device])


def test_nodes_of_several_ranks_exchange_codes_without_their_memory(twin):
    got = reduced(EVERYWHERE["all"], twin, 4, [NOISY], ranks_per_node=2)
    for i, count in enumerate(COUNTS):
        mean = np.mean([gradients(rank, 0, np.float32)[i] for rank in range(4)], axis=0)
        assert np.abs(got[i] - mean).max(initial=0) < 0.5, count


def test_what_is_sampled_of_the_error_is_near_the_host_s(twin):
    def measured(place):
        def program(me):
            for step in range(3):
                (x,) = gradients(me.rank, step, np.float32, [200_000])
                me.allreduce("w", x, "average", NOISY, device=place).wait()
            return me.engine.quality()["w"]["nmse"]

        return on_ranks(2, program, gpu_library=str(twin))

    for host, device in zip(measured(-1), measured(0), strict=True):
        assert device == pytest.approx(host, rel=0.05)


def test_a_tensor_is_read_only_once_its_stream_has_written_it(twin):
    order = Order(Kernels(twin, HostMemory()))
    stream, source = order.stream(), np.arange(1000, dtype=np.float32)
    others_wait = threading.Event()

    def program(me):
        x = np.full(1000, np.nan if me.rank == 0 else 1, dtype=np.float32)
        if me.rank == 1:
            handle = me.allreduce("w", x)
            others_wait.wait()
            assert not handle.done()
        else:
            with order.late(stream):
                order.copy(x.ctypes.data, source.ctypes.data, x.nbytes, stream)
                handle = me.allreduce("w", x, device=0, stream=stream)
                # What does not wait for that stream goes on.
                y = np.ones(10, dtype=np.float32)
                other = me.allreduce("y", y, device=0)
                others_wait.set()
                assert not handle.done()
            handle.wait()
            other.wait()
            return x
        me.allreduce("y", np.ones(10, dtype=np.float32)).wait()
        handle.wait()
        return x

    try:
        for result in on_ranks(2, program, gpu_library=str(twin)):
            np.testing.assert_array_equal(result, source + 1)
    finally:
        order.end()


def test_a_rank_whose_device_still_computes_is_not_deadlocked(twin):
    order = Order(Kernels(twin, HostMemory()))
    stream = order.stream()

    def program(me):
        computed, logged = np.ones(10, dtype=np.float32), np.ones(1)
        if me.rank == 1:  # waits for what the device of rank 0 computes, before it submits the rest
            me.allreduce("computed", computed, device=0).wait()
            me.allreduce("logged", logged).wait()
            return logged[0]
        with order.late(stream):
            handle = me.allreduce("computed", computed, device=0, stream=stream)
            other = threading.Thread(target=me.allreduce("logged", logged).wait)
            other.start()
            time.sleep(1)  # both ranks wait meanwhile, for longer than a deadlock would
        other.join()
        handle.wait()
        return logged[0]

    try:
        assert on_ranks(2, program, gpu_library=str(twin), deadlock_s=0.3) == [2, 2]
    finally:
        order.end()


def test_a_rank_leaves_once_its_device_has_computed_what_others_wait_for(twin):
    order = Order(Kernels(twin, HostMemory()))
    stream = order.stream()
    order.kernels.hold(stream, True)
    later = threading.Timer(0.3, order.kernels.hold, (stream, False))

    def program(me):
        x = np.ones(10, dtype=np.float32)
        handle = me.allreduce("x", x, device=0, stream=stream if me.rank == 1 else 0)
        if me.rank == 1:
            later.start()
            return None  # its script ends
        handle.wait()
        return x[0]

    try:
        assert on_ranks(2, program, gpu_library=str(twin)) == [2, None]
    finally:
        later.join()
        order.end()


def test_no_other_device_is_initialized(twin):
    kernels = Kernels(twin, HostMemory())
    before = kernels.misplaced()

    def program(me):
        x = np.ones(1000, dtype=np.float32)
        for step in range(3):
            me.allreduce("x", x, coding=NEAREST, device=1, now=step == 1).wait()
        return x[0]

    assert on_ranks(2, program, gpu_library=str(twin)) == [8, 8]
    assert kernels.misplaced() == before


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_a_group_of_tensors_in_both_memories_is_done_when_its_copies_are(twin, names):
    def program(me):
        group = {"group": "g", "group_size": 2}
        there, here = np.ones(1_000_000), np.ones(3)
        for step in range(5):
            handles = [
                me.allreduce(names[0], there, "max", device=0, **group),
                me.allreduce(names[1], here, **group),
            ]
            for handle in handles:
                handle.wait()
            np.testing.assert_array_equal(there, step + 1)
            there += me.rank == 0
        return here[0]

    assert on_ranks(2, program, gpu_library=str(twin)) == [32, 32]


def test_an_operation_in_a_captured_stream_is_refused_and_the_job_goes_on(twin):
    order = Order(Kernels(twin, HostMemory()))
    stream = order.stream()
    order.kernels.capture(stream, True)

    def program(me):
        x = np.ones(10, dtype=np.float32)
        with pytest.raises(HorovodInternalError, match="captured in a graph"):
            me.allreduce("x", x, device=0, stream=stream)
        me.allreduce("x", x, device=0).wait()
        return x

    try:
        for result in on_ranks(2, program, gpu_library=str(twin)):
            np.testing.assert_array_equal(result, 2)
    finally:
        order.kernels.capture(stream, False)
        order.end()


@pytest.mark.parametrize("place", ["all", "even"])
def test_all_other_collectives(twin, place):
    def program(me):
        device = EVERYWHERE[place](me.rank)
        x = np.arange(6, dtype=np.int32) + me.rank
        most, named = x.copy(), x.copy()
        me.allreduce("most", most, "max", device=device).wait()
        me.broadcast("named", named, root=2, device=device).wait()
        gathered = output(me.allgather("rows", x, device=device), np.int32)
        swapped = output(me.alltoall("swap", x, [2, 2, 2], device=device), np.int32)
        share = output(me.reducescatter("share", x, device=device), np.int32)
        return most, named, gathered, swapped, share

    for rank, got in enumerate(on_ranks(3, program, gpu_library=str(twin))):
        each = [np.arange(6, dtype=np.int32) + r for r in range(3)]
        mine = slice(2 * rank, 2 * rank + 2)
        expected = (
            each[2], each[2], np.concatenate(each), np.concatenate([x[mine] for x in each]),
            np.sum(each, axis=0)[mine],
        )  # fmt: skip
        for result, want in zip(got, expected, strict=True):
            np.testing.assert_array_equal(result, want)


def test_copies_of_several_reductions_overlap_and_meet_none_of_the_others_memory(twin):
    """Each tensor alone is a response: what the next reads is copied while one is carried out."""

    def program(me):
        device = EVERYWHERE["even"](me.rank)
        for step in range(3):
            xs = [np.full(200 + i, me.rank + i + step, dtype=np.float64) for i in range(20)]
            coded = np.ones(700, dtype=np.float32)
            handles = [me.allreduce(f"t{i}", x, device=device) for i, x in enumerate(xs)]
            handles.insert(10, me.allreduce("coded", coded, coding=NEAREST, device=device))
            for handle in handles:
                handle.wait()
            for i, x in enumerate(xs):
                np.testing.assert_array_equal(x, 3 * (i + step) + 3)
            np.testing.assert_array_equal(coded, 3)

    same(
        [
            [] if got is None else got
            for got in on_ranks(3, program, gpu_library=str(twin), fusion_bytes=1)
        ]
    )


def test_a_copy_in_flight_of_an_operation_that_has_failed_keeps_its_memory(twin):
    """Otherwise the copy would overwrite the table that is uploaded for the next kernel."""
    kernels = Kernels(twin, HostMemory())
    together = threading.Barrier(2)

    def hold(held):
        if together.wait() == 0:
            kernels.hold(None, held)
        together.wait()

    def program(me):
        me.allreduce("first", np.ones(300, np.float32), coding=NEAREST, device=0).wait()
        hold(True)
        try:
            with pytest.raises(HorovodInternalError, match="shape"):
                me.allreduce("w", np.full(5000 + me.rank, 7, np.float32), device=0).wait()
            xs = [np.full(300, me.rank + i, np.float32) for i in range(2)]
            group = {"group": "g", "group_size": 2}
            handles = [
                me.allreduce(f"x{i}", x, coding=NEAREST, device=0, **group)
                for i, x in enumerate(xs)
            ]
            time.sleep(LATE_S)  # the table is uploaded meanwhile
        finally:
            hold(False)
        for handle in handles:
            handle.wait()
        return xs

    for i, x in enumerate(same(on_ranks(2, program, gpu_library=str(twin)))):
        np.testing.assert_array_equal(x, 2 * i + 1)


@pytest.mark.parametrize("count", [300, 70_000])
@pytest.mark.parametrize("guilty", [0, 1])
def test_nan_is_named_with_tensor_and_rank(twin, guilty, count):
    def program(me):
        x = np.ones(count, dtype=np.float32)
        if me.rank == guilty:
            x[count - 1] = np.nan
        handle = me.allreduce("w", x, "average", NOISY, check_finite=True, device=0)
        with pytest.raises(NonFiniteGradientError) as caught:
            handle.wait()
        return str(caught.value)

    for message in on_ranks(2, program, gpu_library=str(twin)):
        assert (
            f"tensor 'w' holds NaN or Inf after allreduce; the values came from rank(s) {guilty}"
            in message
        )


def test_what_a_device_owes_is_paid_on_the_host_and_back(twin):
    """The sum of all results and of what is owed stays the gradients', wherever each step is."""

    def program(me):
        total = np.zeros(3000)
        for step, device in enumerate([0, -1, 0, 0, -1]):
            (x,) = gradients(me.rank, step, np.float32, [3000])
            two = _core.CodecSpec(bits=2, contract=True, bucket_size=64)
            me.allreduce("w", x, "average", two, error_feedback=True, device=device).wait()
            total += x
        return total, me.engine.owed_share("w")

    results = on_ranks(3, program, gpu_library=str(twin))
    rest = np.sum([share for _, share in results], axis=0)
    every = [gradients(r, s, np.float64, [3000])[0] for r in range(3) for s in range(5)]
    assert np.abs(rest).max() > 1e-3
    np.testing.assert_allclose(results[0][0] + rest, np.sum(every, axis=0) / 3, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("planner", ["advise", "on"])
def test_what_is_known_of_the_processor_s_speed_is_not_held_against_a_device(twin, planner):
    said = []

    def program(me):
        for name, device in (("device", 0), ("host", -1)):
            for _ in range(20):
                x = np.ones(1 << 16, dtype=np.float32)
                me.allreduce(name, x, "average", NOISY, device=device).wait()
            if device == 0:
                assert said == []
        return [me.engine.quality()[name]["coding"] for name in ("device", "host")]

    slow_coding = {"machine": FAST, "planner": planner, "log": said.append}
    for device, host in on_ranks(3, program, gpu_library=str(twin), **slow_coding):
        assert device.startswith("qsgd(bits=4,")
        assert host.startswith("qsgd(bits=4,") == (planner == "advise")
    assert any("costs time here" in line for line in said) == (planner == "advise")


def test_without_kernels_a_device_s_tensor_is_refused():
    def program(me):
        me.allreduce("w", np.ones(3, dtype=np.float32), device=0).wait()

    (error,) = on_ranks(1, program)
    assert isinstance(error, UsageError)
    assert "no GPU kernels" in str(error)
