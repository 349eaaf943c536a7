"""Operations that a framework's runtime starts through the table of C functions."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from qsgd_hpc import _core
from qsgd_hpc.errors import UsageError
from tests.engine.ranks import on_ranks

FLOAT32 = 7  # of qsgd::DType
USAGE = 1  # of qsgd::ErrorKind
P, S, I64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int64)


class Tensor(ctypes.Structure):
    _fields_ = (
        ("operation", ctypes.c_char_p), ("operation_bytes", S), ("dtype", ctypes.c_uint8),
        ("shape", I64), ("dimensions", S), ("splits", I64), ("splits_count", S),
        ("input", P), ("output", P),
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


def text(**fields):
    return _core.Operation(**fields).text()


def run(table, texts, arrays, outputs=None):
    """Start one call and wait for it; return (error, message, results) and what was released."""
    shapes = [(ctypes.c_int64 * a.ndim)(*a.shape) for a in arrays]
    tensors = (Tensor * len(arrays))()
    for tensor, words, array, shape in zip(tensors, texts, arrays, shapes, strict=True):
        tensor.operation, tensor.operation_bytes, tensor.dtype = words, len(words), FLOAT32
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


FIELDS = {
    "kind": "allreduce", "name": "x", "op": "max", "prescale": 0.5, "postscale": 3.0,
    "coding": _core.Coding(
        _core.CodecSpec(bits=4), auto_bits=True, error_feedback=True, nmse_budget=0.25
    ),
    "lasting": True, "check_finite": True, "process_set": 3, "group": _core.Group("g", 2),
    "root": 1, "shape": [2, 3], "dtype": "int8", "ranks": [1, 4],
}  # fmt: skip


def test_an_operation_comes_back_from_its_text():
    operation = _core.Operation(**FIELDS)
    assert _core.Operation.of_text(operation.text()) == operation
    assert {name: getattr(operation, name) for name in FIELDS} == FIELDS
    assert not {b" "[0], b","[0]} & set(operation.text())


@pytest.mark.parametrize("name", FIELDS)
def test_operations_differ_in_each_field(name):
    operation, usual = _core.Operation(**FIELDS), getattr(_core.Operation(kind="join"), name)
    other = operation.replaced(**{name: usual})
    assert other != operation
    assert getattr(other, name) == usual
    assert other.replaced(**{name: FIELDS[name]}) == operation


def test_what_is_no_operation_is_refused():
    with pytest.raises(UsageError, match=r"unknown operation 'sum'.* allreduce, broadcast"):
        _core.Operation(kind="sum")
    with pytest.raises(TypeError, match=r"no \['colour'\]; its fields are kind name"):
        _core.Operation(kind="join", colour="red")
    with pytest.raises(TypeError, match=r"operation's root cannot be 'first'"):
        _core.Operation(kind="broadcast", root="first")
    with pytest.raises(AttributeError, match="no 'colour'"):
        _ = _core.Operation(kind="join").colour
    with pytest.raises(UsageError, match="another version of qsgd-hpc"):
        _core.Operation.of_text(b"1" + _core.Operation(kind="join").text()[1:])


def test_several_tensors_end_as_one_call(table, engine):
    arrays = [np.arange(n, dtype=np.float32) for n in (5, 3)]
    outputs = [np.empty_like(a) for a in arrays]
    texts = [text(kind="allreduce", name=f"sum{i}", postscale=i + 2.0) for i in range(2)]
    error, _, results = run(table, texts, arrays, outputs)
    assert (error, len(results)) == (0, 2)
    for i, (array, output) in enumerate(zip(arrays, outputs, strict=True)):
        np.testing.assert_array_equal(output, (i + 2) * array)


def test_results_of_the_core_are_handed_over(table, engine):
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    error, _, [(data, shape, sizes)] = run(table, [text(kind="allgather", name="rows")], [array])
    assert (error, shape, sizes) == (0, [3, 2], [3])
    np.testing.assert_array_equal(np.frombuffer(data, np.float32).reshape(shape), array)


def test_unnamed_calls_are_numbered_and_may_follow_each_other(table, engine):
    texts = [text(kind="allreduce", group=_core.Group("yes", 2))] * 2
    arrays = [np.ones(4, np.float32), np.ones(2, np.float32)]
    for _ in range(3):
        assert run(table, texts, arrays, arrays)[0] == 0


def test_they_make_steps_too_whose_waits_are_not_seen(table, engine):
    texts = [text(kind="allreduce", name="w", lasting=True)]
    array = np.ones(4, np.float32)
    for _ in range(3):
        run(table, texts, [array], [array])
    profile = engine.step_profile()
    assert (profile["steps"], profile["waits_seen"]) == (3, False)
    assert engine.stats()["wait_time_s"] == 0


def test_mistakes_end_the_call_with_their_text(table, engine):
    scalar = [np.array(1.0, np.float32)]
    error, message, _ = run(table, [text(kind="allgather", name="x")], scalar)
    assert error == USAGE
    assert "no rows" in message


def test_a_call_with_a_name_in_flight_starts_nothing(table):
    arrays = [np.ones(4, np.float32), np.ones(2, np.float32)]
    texts = [text(kind="allreduce", name=name) for name in ("a", "b")]

    def program(rank):
        mine = np.full(2, rank.rank + 1, np.float32)
        if rank.rank == 0:
            handle = rank.allreduce("b", mine)  # under way until the other rank starts it
            _core.set_current_engine(rank.engine)
            try:
                refused = run(table, texts, arrays, arrays)
            finally:
                _core.set_current_engine(None)
            rank.barrier("refused").wait()
        else:
            rank.barrier("refused").wait()
            refused, handle = None, rank.allreduce("b", mine)
        handle.wait()
        return refused, mine.tolist()

    (refused, first), (_, second) = on_ranks(2, program)
    assert refused[0] == USAGE
    assert "'b' is already being worked on" in refused[1]
    assert first == second == [3, 3]


def test_without_a_job_the_call_says_so(table):
    texts = [text(kind="allreduce", name="x")]
    error, message, _ = run(table, texts, [np.ones(1, np.float32)], [np.ones(1, np.float32)])
    assert error == USAGE
    assert "call hvd.init()" in message
