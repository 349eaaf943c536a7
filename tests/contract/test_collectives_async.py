"""Handles, orders of waiting and groups; see conftest.py."""

from __future__ import annotations

import asyncio
import random
import threading

import numpy as np
import pytest


@pytest.fixture(scope="module")
def framework(with_handles):
    return with_handles


def of(framework, value, count=3):
    return framework.tensor(np.full(count, value), "float32")


def test_any_order_of_starting_and_of_waiting(framework, hvd):
    orders = random.Random(hvd.rank())
    names = [f"any{i}" for i in range(40)]
    starts = {
        "allreduce": lambda i: hvd.allreduce_async(of(framework, i), name=names[i], op=hvd.Sum),
        "broadcast": lambda i: hvd.broadcast_async(of(framework, i), 0, name=names[i]),
        "allgather": lambda i: hvd.allgather_async(of(framework, i), name=names[i]),
        "alltoall": lambda i: hvd.alltoall_async(of(framework, i, hvd.size()), name=names[i]),
        "reducescatter": lambda i: hvd.reducescatter_async(
            of(framework, i, hvd.size()), name=names[i], op=hvd.Sum
        ),
    }
    for _ in range(3):
        todo = [(kind, i) for kind in starts for i in range(len(names))]
        orders.shuffle(todo)
        handles = {key: starts[key[0]](key[1]) for key in todo}
        orders.shuffle(todo)
        for kind, i in todo:
            result = framework.array(hvd.synchronize(handles[kind, i]))
            n = hvd.size() if kind in ("allreduce", "reducescatter") else 1
            assert set(result.tolist()) == {float(i * n)}, (kind, i)
            assert hvd.poll(handles[kind, i])


def test_a_handle_may_be_waited_for_again_and_gives_the_same(framework, hvd):
    handle = hvd.allreduce_async(of(framework, 1.0), op=hvd.Sum)
    assert handle.wait() is handle.wait()


def test_what_is_no_handle_is_refused(hvd):
    for function in (hvd.synchronize, hvd.poll):
        with pytest.raises(ValueError, match=r"\(NoneType\): pass what an operation with _async"):
            function(None)


def test_a_name_in_flight_is_refused_until_it_is_done(framework, hvd):
    if hvd.size() == 1:
        pytest.skip("one rank waits for nobody")
    first = hvd.allreduce_async(of(framework, 1), name="twice", op=hvd.Sum) if not hvd.rank() else 0
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match=r"'allreduce\.twice'"):
            hvd.allreduce_async(of(framework, 2), name="twice", op=hvd.Sum)
    hvd.barrier()
    first = first or hvd.allreduce_async(of(framework, 1), name="twice", op=hvd.Sum)
    assert framework.array(hvd.synchronize(first)).tolist() == [hvd.size()] * 3


def test_callbacks_and_futures(framework, hvd):
    called = threading.Event()
    handle = hvd.allreduce_async(of(framework, 1), op=hvd.Sum)
    handle.add_done_callback(lambda done: called.set())
    group = hvd.grouped_allreduce_async([of(framework, 1), of(framework, 2)], op=hvd.Sum)
    future = group.future()
    assert [framework.array(t)[0] for t in future.result(60)] == [hvd.size(), 2 * hvd.size()]
    handle.wait()
    assert called.wait(60)
    late = []
    handle.add_done_callback(late.append)
    assert late == [handle]

    async def awaited():
        return await asyncio.wrap_future(hvd.allgather_async(of(framework, 1)).future())

    assert len(framework.array(asyncio.run(awaited()))) == 3 * hvd.size()


def test_a_failure_reaches_a_future(framework, hvd):
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    future = hvd.allreduce_async(of(framework, 1, 3 + hvd.rank() % 2), name="unequal").future()
    assert isinstance(future.exception(60), hvd.HorovodInternalError)


def test_groups_wait_for_all_their_tensors(framework, hvd):
    """Other operations go on meanwhile, and groups may be started in any order."""
    order = [0, 1, 2] if hvd.rank() % 2 else [2, 0, 1]
    groups = {}
    for i in order:
        tensors = [of(framework, i + j) for j in range(4)]
        groups[i] = hvd.grouped_allreduce_async(tensors, name=f"group{i}", op=hvd.Sum)
        hvd.allreduce(of(framework, 1), name=f"between{order.index(i)}")
    for i in range(3):
        values = [framework.array(t)[0] for t in hvd.synchronize(groups[i])]
        assert values == [hvd.size() * (i + j) for j in range(4)]
