"""Operations that a framework's runtime starts through the table of C functions."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import UsageError

FLOAT32 = 7  # of qsgd::DType
USAGE = 1  # of qsgd::ErrorKind
P, S, I64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int64)


class Tensor(ctypes.Structure):
    _fields_ = (
        ("facts", ctypes.c_char_p), ("facts_bytes", S), ("dtype", ctypes.c_uint8), ("shape", I64),
        ("dimensions", S), ("splits", I64), ("splits_count", S), ("input", P), ("output", P),
    )  # fmt: skip


class Result(ctypes.Structure):
    _fields_ = (
        ("owner", P), ("data", P), ("size_bytes", S), ("shape", I64), ("dimensions", S),
        ("sizes", I64), ("sizes_count", S), ("value", ctypes.c_int64),
    )  # fmt: skip


class Outcome(ctypes.Structure):
    _fields_ = (
        ("error", ctypes.c_int), ("message", ctypes.c_char_p), ("results", ctypes.POINTER(Result)),
        ("count", S),
    )  # fmt: skip


Release = ctypes.CFUNCTYPE(None, P)
Done = ctypes.CFUNCTYPE(None, P, ctypes.POINTER(Outcome))


class Caller(ctypes.Structure):
    _fields_ = (("keep", P), ("release", Release), ("context", P), ("done", Done))


class Table(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32),
        ("start", ctypes.CFUNCTYPE(None, ctypes.POINTER(Tensor), S, Caller)),
        ("release", Release),
    )


@pytest.fixture
def table():
    return Table.from_address(_core.foreign_table_address())


@pytest.fixture
def engine():
    config = _core.EngineConfig(stall_warning_s=0.0)
    engine = _core.Engine.over_threads(_core.ThreadWorld(1), 0, config)
    _core.set_current_engine(engine)
    yield engine
    _core.set_current_engine(None)
    engine.shutdown("the test ended")


def run(table, facts, arrays, outputs=None):
    """Start one call and wait for it; return (error, message, results) and what was released."""
    shapes = [(ctypes.c_int64 * a.ndim)(*a.shape) for a in arrays]
    tensors = (Tensor * len(arrays))()
    for tensor, fact, array, shape in zip(tensors, facts, arrays, shapes, strict=True):
        tensor.facts, tensor.facts_bytes, tensor.dtype = fact, len(fact), FLOAT32
        tensor.shape, tensor.dimensions = shape, array.ndim
        tensor.input = array.ctypes.data
    for tensor, output in zip(tensors, outputs or [], strict=bool(outputs)):
        tensor.output = output.ctypes.data
    seen, ended, released = [], threading.Event(), []

    def done(context, outcome):
        it = outcome.contents
        results = []
        for result in it.results[: it.count]:
            data = ctypes.string_at(result.data, result.size_bytes) if result.data else b""
            sizes = result.sizes[: result.sizes_count]
            results.append((data, result.shape[: result.dimensions], sizes))
            table.release(result.owner)
        seen.extend([it.error, it.message.decode(), results])
        ended.set()

    caller = Caller(1, Release(released.append), 2, Done(done))
    table.start(tensors, len(arrays), caller)
    assert ended.wait(60)
    assert released == [1]
    return seen


def test_facts_come_back_as_they_were_given():
    given = {
        "kind": "allreduce", "name": "x", "op": "max", "prescale": 0.5, "postscale": 3.0,
        "coding": _core.CodecSpec(bits=4), "auto_bits": True, "error_feedback": True,
        "nmse_budget": 0.25, "lasting": False, "check_finite": True, "process_set": 3,
        "group": "g", "group_size": 2, "root": 1,
    }  # fmt: skip
    assert _core.read_operation_facts(_core.operation_facts(**given)) == given
    with pytest.raises(UsageError, match="'add_process_set'"):
        _core.operation_facts(kind="add_process_set")


def test_several_tensors_end_as_one_call(table, engine):
    arrays = [np.arange(n, dtype=np.float32) for n in (5, 3)]
    outputs = [np.empty_like(a) for a in arrays]
    facts = [
        _core.operation_facts(kind="allreduce", name=f"sum{i}", postscale=i + 2.0) for i in range(2)
    ]
    error, _, results = run(table, facts, arrays, outputs)
    assert (error, len(results)) == (0, 2)
    for i, (array, output) in enumerate(zip(arrays, outputs, strict=True)):
        np.testing.assert_array_equal(output, (i + 2) * array)


def test_results_of_the_core_are_handed_over(table, engine):
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    error, _, [(data, shape, sizes)] = run(
        table, [_core.operation_facts(kind="allgather", name="rows")], [array]
    )
    assert (error, shape, sizes) == (0, [3, 2], [3])
    np.testing.assert_array_equal(np.frombuffer(data, np.float32).reshape(shape), array)


def test_unnamed_calls_are_numbered_and_may_follow_each_other(table, engine):
    facts = [_core.operation_facts(kind="allreduce", group="yes", group_size=2)] * 2
    arrays = [np.ones(4, np.float32), np.ones(2, np.float32)]
    for _ in range(3):
        assert run(table, facts, arrays, arrays)[0] == 0


def test_they_make_steps_too_whose_waits_are_not_seen(table, engine):
    facts = [_core.operation_facts(kind="allreduce", name="w")]
    array = np.ones(4, np.float32)
    for _ in range(3):
        run(table, facts, [array], [array])
    profile = engine.step_profile()
    assert (profile["steps"], profile["waits_seen"]) == (3, False)
    assert engine.stats()["wait_time_s"] == 0


def test_mistakes_end_the_call_with_their_text(table, engine):
    scalar = [np.array(1.0, np.float32)]
    error, message, _ = run(table, [_core.operation_facts(kind="allgather", name="x")], scalar)
    assert error == USAGE
    assert "no rows" in message


def test_without_a_job_the_call_says_so(table):
    facts = [_core.operation_facts(kind="allreduce", name="x")]
    error, message, _ = run(table, facts, [np.ones(1, np.float32)], [np.ones(1, np.float32)])
    assert error == USAGE
    assert "call hvd.init()" in message
