"""The handler of programs for GPUs, over the kernels' twin: what waits for the program's stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.runtime import basics
from tests.engine.ranks import Rank
from tests.gpu.memory import HostMemory
from tests.gpu.order import LATE_S, Order
from tests.gpu.twin import Kernels
from tests.jax.xla import Api, Xla, program

COUNT = 3000
UNWRITTEN = 0xEE  # the twin fills memory so


@pytest.fixture
def order(twin: Path) -> Iterator[Order]:
    """The device of the one rank whose engine the handler finds."""
    me = Rank(_core.ThreadWorld(1), 0, gpu_library=str(twin))
    _core.set_current_engine(me.engine)
    order = Order(Kernels(twin, HostMemory()))
    yield order
    order.end()
    _core.set_current_engine(basics.context().engine if basics.is_initialized() else None)
    me.engine.shutdown("the test ended")


def arrays(order: Order) -> tuple[np.ndarray, ...]:
    source, x, out = (order.pinned(COUNT) for _ in range(3))
    source[:] = np.random.default_rng(1).standard_normal(COUNT).astype(np.float32)
    return source, x, out


DOUBLED = _core.Operation(kind="allreduce", name="x", op="sum", prescale=2.0)
GATHERED = _core.Operation(kind="allgather", name="x")
SENT = _core.Operation(kind="broadcast", name="x", root=0)


@pytest.mark.parametrize(
    ("operation", "rows", "factor"),
    [(DOUBLED, (), 2), (GATHERED, (COUNT,), 1), (SENT, (), 1)],
    ids=["allreduce", "allgather", "broadcast"],
)
def test_it_returns_once_the_streams_values_have_been_reduced(order, operation, rows, factor):
    source, x, out = arrays(order)
    stream = order.stream()
    xla = Xla(stream)
    call = threading.Thread(target=xla.call, args=(program(operation, rows), x, out), daemon=True)
    with order.late(stream):
        order.copy(x.ctypes.data, source.ctypes.data, source.nbytes, stream)
        call.start()
        call.join(LATE_S)
        assert call.is_alive(), "it has returned before the stream had anything to read"
        assert (out.view(np.uint8) == UNWRITTEN).all()
    call.join(60)
    assert not call.is_alive()
    assert xla.failure is None
    np.testing.assert_array_equal(out, factor * source)


def test_results_may_take_the_place_of_arguments(order):
    source, x, _ = arrays(order)
    x[:] = source
    Xla(order.stream()).call(program(DOUBLED), x, x)
    np.testing.assert_array_equal(x, 2 * source)


def test_errors_are_the_programs(order):
    _, x, out = arrays(order)
    xla = Xla(order.stream())
    xla.call(program(GATHERED, (COUNT - 1,)), x, out)
    assert f"UsageError: 'x': the ranks sent [{COUNT}] rows" in xla.failure
    xla = Xla(order.stream(), device=7)
    xla.call(program(DOUBLED), x, out)
    assert "GPU 7: invalid device ordinal" in xla.failure
    xla = Xla(order.stream())
    xla.api.header.size = Api.device_ordinal.offset
    xla.call(program(DOUBLED), x, out)
    assert "install 0.6 or newer" in xla.failure
    xla = Xla(order.stream())
    xla.call(program(DOUBLED, size=2), x, out)
    assert "call jax.clear_caches()" in xla.failure
