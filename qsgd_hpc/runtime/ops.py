"""Collectives over (pointer, shape, dtype), on which the framework modules are built."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qsgd_hpc._core import Group, Operation
from qsgd_hpc.errors import NonFiniteGradientError, UsageError
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set, require_member

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from qsgd_hpc._core import Handle as CoreHandle
    from qsgd_hpc._core import OperationFields

__all__ = [
    "Adasum", "Average", "Buffer", "Group", "Handle", "Max", "Min", "Op", "Operation", "Product",
    "Received", "Sum", "allreduce", "barrier", "broadcast", "buffer_of", "checked_splits",
    "exchange", "join", "label", "member_names", "operation", "poll", "position_in", "ranks_of",
    "reduce_array", "run_now", "synchronize",
]  # fmt: skip


@dataclass(frozen=True)
class Op:
    """A reduction."""

    name: str

    def __repr__(self) -> str:
        return self.name.capitalize()

    def __reduce__(self) -> str:
        # A copy, of a pickle too, is the constant itself: operations are compared by identity.
        return self.name.capitalize()


Average = Op("average")
"""The mean over the ranks."""
Sum = Op("sum")
"""The sum over the ranks."""
Adasum = Op("adasum")
"""The mean of parallel tensors, the sum of orthogonal ones (Maleki et al., MLSys 2021)."""
Min = Op("min")
"""The least of each element."""
Max = Op("max")
"""The largest of each element."""
Product = Op("product")
"""The product over the ranks."""


_PENDING = object()


class Handle:
    """An operation in flight.

    The core keeps the tensors until the operation is done, so a handle can be dropped.

    Args:
        cores: the core's handles; the operation is done when all of them are.
        result: creates the result, once, after all have succeeded.
    """

    def __init__(self, cores: Sequence[Any], result: Callable[[], Any]) -> None:
        self._cores = tuple(cores)
        self._make = result
        self._result: Any = _PENDING
        self._lock = threading.Lock()

    @classmethod
    def together(cls, handles: Sequence[Handle]) -> Handle:
        """Return one handle for several, whose result is the list of theirs."""
        cores = [core for handle in handles for core in handle._cores]
        return cls(cores, lambda: [handle._value() for handle in handles])

    def done(self) -> bool:
        """Return whether ``wait`` would return immediately."""
        return all(core.done() for core in self._cores)

    def wait(self) -> Any:
        """Return the result; every call returns the same.

        Raises:
            NonFiniteGradientError: a gradient is not finite. Its reduction is still delivered:
                it is not finite on any rank, so all ranks can continue equally.
            HorovodInternalError: the ranks disagree, or a rank died.
        """
        not_finite: NonFiniteGradientError | None = None
        for core in self._cores:
            try:
                core.wait()
            except NonFiniteGradientError as error:
                not_finite = not_finite or error
        value = self._value()
        if not_finite is not None:
            raise not_finite
        return value

    def __call__(self) -> Any:
        """Return the result: in Horovod the handle of a sparse allreduce is a function."""
        return self.wait()

    def _value(self) -> Any:
        with self._lock:  # a callback and the script may call this concurrently
            if self._result is _PENDING:
                self._result = self._make()
                del self._make  # frees the tensors that only it referenced
        return self._result

    def then(self, convert: Callable[[Any], Any]) -> Handle:
        """Return this handle with its result converted; call it before the first wait."""
        make = self._make
        self._make = lambda: convert(make())
        return self

    def add_done_callback(self, call: Callable[[Handle], object]) -> None:
        """Call ``call(handle)`` when the operation has ended, or immediately if it has.

        It runs on the engine's thread and blocks it: be brief, and do not wait for another
        operation there. An exception is reported and dropped.
        """
        left = len(self._cores)
        if not left:
            call(self)
            return
        lock = threading.Lock()

        def core_done() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                call(self)

        for core in self._cores:
            core.add_done_callback(core_done)

    def future(self) -> Future[Any]:
        """Return a ``concurrent.futures.Future`` of the result, for asyncio and thread pools."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def complete(handle: Handle) -> None:
            try:
                future.set_result(handle.wait())
            except Exception as error:
                future.set_exception(error)

        self.add_done_callback(complete)
        return future


@dataclass
class Buffer:
    """Contiguous memory of a framework's tensor."""

    pointer: int
    shape: Sequence[int]
    dtype: str
    owner: Any
    """Keeps the memory alive."""
    device: int = -1
    """The number of the device that has the memory; -1: host memory."""
    stream: int = 0
    """The device's stream: the tensor is ready after the work submitted to it so far."""


def buffer_of(array: NDArray[Any]) -> Buffer:
    """Return the memory of a contiguous numpy array."""
    return Buffer(array.ctypes.data, array.shape, str(array.dtype), array)


@dataclass(frozen=True)
class Received:
    """Result of a collective whose result differs in size from its input."""

    handle: CoreHandle
    shape: list[int]
    rows: list[int]
    """Number of rows from each rank of the process set, for allgather and alltoall."""

    @property
    def data(self) -> NDArray[Any]:
        """The result of a tensor in host memory: uint8, one dimension; owns the memory."""
        return self.handle.output()

    def copy_to(self, target: Buffer) -> None:
        """Copy the result of a tensor on a device to memory of that device."""
        self.handle.copy_output(target.pointer, target.stream)


Result = Callable[[], Any]
Making = Callable[[Received], Any]


def ranks_of(process_set: ProcessSet) -> list[int]:
    """Return the ranks of a set that this rank is in."""
    require_member(process_set)
    return process_set.ranks or []


def position_in(process_set: ProcessSet) -> int:
    """Return this rank's position among the ranks of its set."""
    return ranks_of(process_set).index(basics.rank())


def label(kind: str, name: str | None, process_set: ProcessSet = global_process_set) -> str:
    """Return the name, or a number that is equal on ranks that call in the same order."""
    if name:
        return name
    number = require_member(process_set)
    where = f"set{number}." if number else ""
    if joins := basics.joins():  # a joined rank made fewer calls: all count from 0 again
        where += f"join{joins}."
    return f"noname.{where}{basics.next_number(f'{kind}.{where}')}"


def member_names(name: str, count: int) -> list[str]:
    """Return the names of a group's operations."""
    return [f"{name}.{i}" for i in range(count)]


_NO_TENSOR: OperationFields = {"shape": [0], "dtype": "uint8"}


class _Now(threading.local):
    on = False


_now = _Now()


def run_now(start: Callable[..., Handle], *args: Any, **options: Any) -> Any:
    """Return the result of the operation that ``start`` starts.

    The calling thread executes it itself if that is faster than waking the engine's thread.
    """
    _now.on = True
    try:
        handle = start(*args, **options)
    finally:
        _now.on = False
    return handle.wait()


def operation(
    kind: str,
    name: str,
    process_set: ProcessSet = global_process_set,
    *,
    op: Op = Sum,
    **fields: Unpack[OperationFields],
) -> Operation:
    """Return the core's description of an operation, which can be started repeatedly.

    Args:
        kind: allreduce, broadcast, allgather, alltoall or reducescatter.
        name: equal on every rank; with "" the engine numbers it, which requires that every rank
            calls in the same order.
        process_set: the participating ranks.
        op: the reduction.
        fields: the other fields, by their names in the core.
    Raises:
        UsageError: this rank is not in the set, or not initialised.
    """
    return Operation(
        kind=kind, name=name, process_set=require_member(process_set), op=op.name, **fields
    )


def _start(what: Operation, source: Buffer, target: Buffer | None) -> Any:
    """Start an operation on a tensor; its result is written to ``target``, or to core memory.

    ``source`` and ``target`` are memory of the same device.
    """
    into, owner = (target.pointer, target.owner) if target else (0, None)
    keep = source.owner, owner
    return basics.context().engine.start(
        what, source.pointer, into, keep, _now.on, source.device, source.stream
    )


# Operations that are expected again, by name, with what they were made from. To make one takes
# longer than all that the core does with a small tensor.
_lasting: dict[str, tuple[Any, Operation]] = {}
_MOST_LASTING = 4096


def _of(
    tensor: Buffer,
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    *,
    op: Op = Sum,
    **fields: Unpack[OperationFields],
) -> Operation:
    text = f"{kind}.{label(kind, name, process_set)}"
    fields["shape"], fields["dtype"] = list(tensor.shape), tensor.dtype
    if not fields.get("lasting"):
        return operation(kind, text, process_set, op=op, **fields)
    described = require_member(process_set), op, fields
    known = _lasting.get(text)
    if known is None or known[0] != described:
        if len(_lasting) >= _MOST_LASTING:
            _lasting.clear()
        known = _lasting[text] = described, operation(kind, text, process_set, op=op, **fields)
    return known[1]


def allreduce(
    source: Buffer,
    target: Buffer,
    *,
    name: str | None,
    op: Op,
    process_set: ProcessSet = global_process_set,
    result: Result,
    **fields: Unpack[OperationFields],
) -> Handle:
    """Start reducing ``source`` over the ranks into ``target`` (which may be the same memory).

    By default, names are assumed to be used again.
    """
    fields.setdefault("lasting", name is not None)
    what = _of(source, "allreduce", name, process_set, op=op, **fields)
    return Handle([_start(what, source, target)], result)


def reduce_array(array: NDArray[Any], name: str | None, op: Op, **options: Any) -> None:
    """Replace a contiguous numpy array by its reduction over the ranks; see :func:`allreduce`."""
    buffer = buffer_of(array)
    allreduce(buffer, buffer, name=name, op=op, result=lambda: None, **options).wait()


def broadcast(
    target: Buffer,
    *,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet = global_process_set,
    result: Result,
) -> Handle:
    """Start replacing ``target`` by root_rank's ``target``, on every rank of the set.

    ``root_rank`` is a rank of the job, whatever the set.
    """
    what = _of(target, "broadcast", name, process_set, root=root_rank)
    return Handle([_start(what, target, target)], result)


def exchange(
    kind: str,
    source: Buffer,
    *,
    name: str | None,
    op: Op = Sum,
    process_set: ProcessSet = global_process_set,
    result: Making,
    **fields: Unpack[OperationFields],
) -> Handle:
    """Start an allgather, an alltoall or a reducescatter; the core allocates the result.

    ``source`` has at least one dimension. An allgather returns the rows of all ranks in rank order;
    only the number of rows may differ between ranks. An alltoall sends ``splits[i]`` rows to the
    i-th rank of the set. A reducescatter splits the rows as evenly as possible; the first ranks get
    one more.
    """
    core = _start(_of(source, kind, name, process_set, op=op, **fields), source, None)
    return Handle([core], lambda: result(Received(core, list(core.shape()), list(core.sizes()))))


def checked_splits(rows: int, splits: Sequence[int] | None, process_set: ProcessSet) -> list[int]:
    """Return the number of rows of an alltoall for each rank of the set; None: equal numbers.

    Raises:
        UsageError: the sum of splits is not the number of rows.
    """
    me, ranks = basics.rank(), ranks_of(process_set)
    if splits is None:
        if rows % len(ranks):
            raise UsageError(
                f"rank {me}: alltoall of {rows} rows over {len(ranks)} ranks: pass splits=, or "
                "rows that divide evenly"
            )
        return [rows // len(ranks)] * len(ranks)
    given = list(splits)
    try:
        counts = [int(n) for n in given]
    except TypeError:  # rows of a matrix
        counts = []
    if len(counts) != len(ranks) or counts != given or min(counts) < 0 or sum(counts) != rows:
        raise UsageError(
            f"rank {me}: alltoall with splits={given} of {rows} rows over {len(ranks)} ranks: "
            "pass one non-negative number of rows per rank; their sum must equal the rows"
        )
    return counts


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the set has called this."""
    name = f"barrier.{label('barrier', None, process_set)}"
    core = basics.context().engine.start(
        operation("barrier", name, process_set, **_NO_TENSOR), now=True
    )
    Handle([core], lambda: None).wait()


def join() -> int:
    """Announce that this rank has no more data; return the last rank when all have joined.

    Until then, this rank contributes zeros to the others' allreduces.
    """
    core = basics.context().engine.start(operation("join", "", **_NO_TENSOR))
    last: int = Handle([core], core.result).wait()
    return last


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous operation and return its result."""
    _require_handle(handle, "synchronize")
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Return whether ``synchronize`` would return immediately."""
    _require_handle(handle, "poll")
    return handle.done()


def _require_handle(handle: Any, function: str) -> None:
    if not isinstance(handle, Handle):
        raise UsageError(
            f"{function}({type(handle).__name__}): pass what an operation with _async in its name "
            "has returned"
        )
