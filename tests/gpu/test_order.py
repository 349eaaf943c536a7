"""Streams, events and memory of the kernels' library: what waits for what, and what does not."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.gpu.order import Order
from tests.gpu.test_kernels import assert_same, expected, gaussian
from tests.gpu.twin import Code, Kernels

COUNT, CODE = 1300, Code(4)
SIZE = COUNT * 4  # bytes of the elements


@pytest.fixture
def order(kernels: Kernels) -> Iterator[Order]:
    order = Order(kernels)
    yield order
    order.end()


@pytest.fixture
def late(order: Order) -> Order:
    """Where work can be held, so that what does not wait for it is certain to be earlier."""
    if not order.twin:
        pytest.skip("a device starts its work when it likes")
    return order


def encode(order: Order, x: int, message: int, stream: int) -> None:
    """Queue the kernel; all addresses are the device's."""
    table, run, draw = order.kernels.table, order.kernels.whole(COUNT, CODE), order.kernels.draw()
    if why := table.encode(x, run, draw, message, stream):
        raise RuntimeError(why.decode())


def test_a_kernel_behind_an_event_sees_what_the_other_stream_wrote(order: Order):
    copies, kernels = order.stream(), order.stream()
    source, message = order.pinned(COUNT), order.pinned(CODE.bytes(COUNT), np.uint8)
    source[:] = gaussian(COUNT)
    x = order.device(SIZE, copies)
    with order.late(copies):
        order.copy(x, source.ctypes.data, SIZE, copies)
        order.call("wait", kernels, order.recorded(copies))
        encode(order, x, message.ctypes.data, kernels)
    order.finish(kernels)
    assert_same(message, expected(source, CODE))


def test_what_does_not_wait_for_the_other_stream_sees_what_was_before(late: Order):
    writes, reads = late.stream(), late.stream()
    source, x, seen = (late.pinned(COUNT) for _ in range(3))
    source[:], x[:] = 2, 1
    with late.late(writes):
        late.copy(x.ctypes.data, source.ctypes.data, SIZE, writes)
        late.copy(seen.ctypes.data, x.ctypes.data, SIZE, reads)
        late.finish(reads)
    late.finish(writes)
    assert (seen == 1).all()
    assert (x == 2).all()


def test_copies_of_all_directions_keep_their_order(order: Order):
    """Whatever is written over a source behind its copy."""
    stream = order.stream()
    plain, back = gaussian(COUNT), np.zeros(COUNT, np.float32)
    pinned, between, result = (order.pinned(COUNT) for _ in range(3))
    near, far = order.device(SIZE, stream), order.device(SIZE, stream)
    pinned[:] = plain
    way = [pinned.ctypes.data, near, far, between.ctypes.data, result.ctypes.data]
    with order.late(stream):
        for source, to in itertools.pairwise(way):
            order.copy(to, source, SIZE, stream)
        order.call("clear", near, SIZE, stream)
        order.copy(pinned.ctypes.data, near, SIZE, stream)
        order.copy(far, plain.ctypes.data, SIZE, stream)
        order.copy(back.ctypes.data, far, SIZE, stream)
    order.finish(stream)
    assert_same(result, plain)
    assert_same(back, plain)
    assert not pinned.any()


def test_an_event_passes_once_the_work_before_it_is_done(order: Order):
    stream, event = order.stream(), order.event()
    assert order.passed(event), "nothing was recorded that it waits for"
    x, source = order.pinned(COUNT), order.pinned(COUNT)
    x[:], source[:] = 1, 2
    with order.late(stream):
        order.copy(x.ctypes.data, source.ctypes.data, SIZE, stream)
        order.call("record", event, stream)
        order.call("wait", stream, event)  # which its own stream does anyway
        if order.twin:
            assert not order.passed(event)
            assert (x == 1).all()
    order.finish(stream)
    assert order.passed(event)
    assert (x == 2).all()


def test_a_wait_is_for_what_was_recorded_when_it_was_queued(late: Order):
    first, second, event = late.stream(), late.stream(), late.event()
    late.call("record", event, first)
    late.finish(first)
    with late.late(first):
        with late.late(second):
            late.call("wait", second, event)
            late.call("record", event, first)
        late.finish(second)
        assert not late.passed(event)
    late.finish(first)
    assert late.passed(event)


def test_kernels_read_and_write_pinned_memory(order: Order):
    stream = order.stream()
    x, message = order.pinned(COUNT), order.pinned(CODE.bytes(COUNT), np.uint8)
    x[:] = gaussian(COUNT)
    encode(order, x.ctypes.data, message.ctypes.data, stream)
    order.finish(stream)
    assert_same(message, expected(x, CODE))


def test_a_device_is_one_threads_choice(order: Order):
    def use(device: int) -> int:
        before = np.full(1, -1, np.int32)
        order.call("use", device, before.ctypes.data)
        return int(before[0])

    start, others = use(0), []
    assert use(0) == 0
    if order.twin:
        assert use(1) == 0
        thread = threading.Thread(target=lambda: others.append(use(0)))
        thread.start()
        thread.join()
        assert others == [0]
        assert use(0) == 1
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        use(1000)
    test_kernels_read_and_write_pinned_memory(order)  # and no kernel is taken to have failed
    use(start)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (Code(2), ""),
        (Code(8, "l2", bucket=32768), ""),
        (Code(1, scheme="eden"), ""),
        (Code(1), "bits must be 2 to 8"),
        (Code(9), "bits must be 1 to 8"),
        (Code(4, bucket=100), "bucket not a multiple of 64"),
        (Code(4, bucket=1024, scheme="eden"), "bucket not a power of two up to 512"),
        (Code(4, scheme="topk"), "a code without GPU kernels"),
    ],
)
def test_the_library_says_what_it_cannot_code(kernels: Kernels, code: Code, why: str):
    assert kernels.refuse(code) == why


def test_the_twin_fills_memory_in_the_streams_order(late: Order):
    stream = late.stream()
    early, seen = gaussian(COUNT), late.pinned(COUNT)
    with late.late(stream):
        x = late.device(SIZE, stream)
        late.copy(x, early.ctypes.data, SIZE, None)  # by another stream, too early
        late.copy(seen.ctypes.data, x, SIZE, stream)
    late.finish(stream)
    assert (seen.view(np.uint8) == 0xEE).all()
    assert (late.pinned(4, np.uint8) == 0xEE).all()


def test_a_process_ends_although_its_streams_have_work(twin: Path):
    body = f"""
from pathlib import Path
from tests.gpu.memory import HostMemory
from tests.gpu.order import Order
from tests.gpu.twin import Kernels

order = Order(Kernels(Path({str(twin)!r}), HostMemory()))
idle, waits, held = order.stream(), order.stream(), order.stream()
order.kernels.hold(held, True)
order.call("wait", waits, order.recorded(held))
"""
    subprocess.run([sys.executable, "-c", body], check=True)
