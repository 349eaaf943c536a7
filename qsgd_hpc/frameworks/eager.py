"""Start collectives on tensors of any framework, with conversions of types and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from qsgd_hpc.compression import FLOATING
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.adapter import Adapter
from qsgd_hpc.frameworks.compressors import NoneCompressor
from qsgd_hpc.frameworks.reduction import (
    Reduction,
    coding_for,
    compressor_of,
    is_widened,
    op_for,
    require_values,
)
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Group, Handle, Op

if TYPE_CHECKING:
    from qsgd_hpc._core import Coding
    from qsgd_hpc.runtime.process_sets import ProcessSet

__all__ = [
    "as_rows", "buffer_of", "start_allgather", "start_allgathers", "start_allreduce",
    "start_allreduces", "start_alltoall", "start_broadcast", "start_reducescatter",
    "start_reducescatters",
]  # fmt: skip

KNOWN = frozenset({"uint8", "int8", "int16", "int32", "int64"}) | FLOATING
"""Types that the core computes with."""
_PARTS = {"complex64": "float32", "complex128": "float64"}
# Elements of other types, if they are not reduced, are sent as integers of the same size.
_SAME_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def buffer_of(adapter: Adapter, readable: Any) -> ops.Buffer:
    """Return the core's description of a tensor.

    Raises:
        UsageError: the core has no arithmetic for this type.
    """
    given, shape = adapter.dtype(readable), readable.shape
    name = "uint8" if given == "bool" else given
    if adapter.reduces_complex and given in _PARTS:
        name, shape = _PARTS[given], (*shape, 2)
    if name not in KNOWN:
        raise UsageError(
            f"{adapter.word}s of {given} cannot be reduced; convert it to one of "
            f"{', '.join(sorted(KNOWN))} first, with {adapter.conversion}"
        )
    return _buffer(adapter, readable, shape, name)


def _moved_buffer_of(adapter: Adapter, readable: Any) -> ops.Buffer:
    """Return the core's description of a tensor of any type, which is not reduced."""
    given = adapter.dtype(readable)
    if given in KNOWN or (adapter.reduces_complex and given in _PARTS):
        return buffer_of(adapter, readable)
    size, shape = adapter.itemsize(readable), readable.shape
    name = _SAME_SIZE.get(size)
    shape, dtype = (shape, name) if name else ((*shape, size), "uint8")
    return _buffer(adapter, readable, shape, dtype)


def _buffer(adapter: Adapter, readable: Any, shape: Sequence[int], dtype: str) -> ops.Buffer:
    address, owner = adapter.address(readable), adapter.owner(readable)
    return ops.Buffer(address, shape, dtype, owner, *adapter.device(readable))


def as_rows(tensor: Any, operation: str, words: str = "tensors") -> Any:
    """Return a tensor after checking that it has a first dimension, along which it is split."""
    if not tensor.ndim:
        raise UsageError(
            f"{operation} splits {words} along the first dimension, which a scalar does not "
            "have; pass x.reshape(1)"
        )
    return tensor


class _Prepared(NamedTuple):
    """A validated tensor that can be passed to the core."""

    adapter: Adapter
    tensor: Any
    into: Any
    readable: Any
    spare: bool
    """Whether nothing else uses the memory of ``readable``."""
    compressor: Any
    context: Any
    place: Any
    op: Op

    def returned(self, result: Any) -> Any:
        """Return a readable tensor's values in the caller's type and device."""
        adapter = self.adapter
        if self.compressor is NoneCompressor:
            return adapter.delivered(result, self.tensor, self.into)
        with adapter.unrecorded():
            placed = adapter.placed(result, self.place)
            back = self.compressor.decompress(placed, self.context)
            return adapter.delivered(back, self.tensor, self.into)


def _prepare(adapter: Adapter, tensor: Any, reduction: Reduction, into: Any = None) -> _Prepared:
    dtype = adapter.dtype(adapter.checked(tensor))
    op = op_for(reduction.op, dtype, reduction.prescale, reduction.postscale)
    widened = is_widened(dtype, op)
    compressor = NoneCompressor if widened else compressor_of(reduction.compression)
    compressed, context = tensor, None
    if compressor is not NoneCompressor:
        with adapter.unrecorded():
            compressed, context = compressor.compress(adapter.detached(tensor))
    readable = adapter.readable(compressed)
    spare = widened or not adapter.shares(readable, compressed)
    if widened:
        readable = adapter.cast(readable, "int64")
    place = adapter.place(compressed)
    return _Prepared(adapter, tensor, into, readable, spare, compressor, context, place, op)


def start_allreduces(
    adapter: Adapter,
    tensors: Sequence[Any],
    reduction: Reduction,
    name: str,
    *,
    grouped: bool = False,
    in_place: bool = False,
) -> Handle:
    """Start reducing tensors in place, or into new ones; the result is their list."""
    coding = coding_for(reduction)
    into = tensors if in_place else [None] * len(tensors)
    prepared = [_prepare(adapter, t, reduction, o) for t, o in zip(tensors, into, strict=True)]
    return _together(
        prepared,
        name,
        grouped,
        lambda each, one, group: _allreduce(each, reduction, one, group, coding),
    )


def start_allreduce(
    adapter: Adapter,
    tensor: Any,
    reduction: Reduction,
    name: str,
    group: Group | None,
    *,
    coding: Coding | None,
    check_finite: bool,
    in_place: bool = False,
) -> Handle:
    """Start reducing one tensor with its own coding."""
    each = _prepare(adapter, tensor, reduction, tensor if in_place else None)
    return _allreduce(each, reduction, name, group, coding, check_finite=check_finite)


def _allreduce(
    each: _Prepared,
    reduction: Reduction,
    name: str,
    group: Group | None,
    coding: Coding | None,
    *,
    check_finite: bool = False,
) -> Handle:
    adapter, readable = each.adapter, each.readable
    in_place = each.into is not None and adapter.shares(readable, each.into)
    target = readable if each.spare or in_place else adapter.new_like(readable)
    source = buffer_of(adapter, readable)
    if adapter.dtype(each.tensor) not in FLOATING:
        coding = None
    return ops.allreduce(
        source,
        source if target is readable else _buffer(adapter, target, source.shape, source.dtype),
        name=name,
        op=each.op,
        prescale=reduction.prescale,
        postscale=reduction.postscale,
        coding=coding,
        check_finite=check_finite or coding is not None,
        lasting=reduction.lasting,
        process_set=reduction.process_set,
        group=group,
        result=lambda: each.returned(target),
    )


def start_reducescatters(
    adapter: Adapter,
    tensors: Sequence[Any],
    reduction: Reduction,
    name: str,
    *,
    grouped: bool = False,
) -> Handle:
    """Start reducing tensors; each rank gets its share of the rows."""
    require_values(reduction)
    prepared = [
        _prepare(adapter, as_rows(adapter.checked(t), "reducescatter"), reduction) for t in tensors
    ]
    return _together(
        prepared, name, grouped, lambda each, one, group: _scatter(each, reduction, one, group)
    )


def start_reducescatter(
    adapter: Adapter, tensor: Any, reduction: Reduction, name: str, group: Group | None
) -> Handle:
    """Start reducing one tensor; each rank gets its share of the rows."""
    return _scatter(_prepare(adapter, tensor, reduction), reduction, name, group)


def _scatter(each: _Prepared, reduction: Reduction, name: str, group: Group | None) -> Handle:
    adapter, readable = each.adapter, each.readable
    return ops.exchange(
        "reducescatter",
        buffer_of(adapter, readable),
        name=name,
        op=each.op,
        prescale=reduction.prescale,
        postscale=reduction.postscale,
        process_set=reduction.process_set,
        group=group,
        result=lambda received: each.returned(_made(adapter, received, readable)),
    )


def start_allgathers(
    adapter: Adapter,
    tensors: Sequence[Any],
    name: str,
    process_set: ProcessSet,
    *,
    grouped: bool = False,
) -> Handle:
    """Start gathering tensors; the result is the list of the results of ``start_allgather``."""
    return _together(
        tensors,
        name,
        grouped,
        lambda t, one, group: start_allgather(adapter, t, one, process_set, group),
    )


def start_allgather(
    adapter: Adapter, tensor: Any, name: str, process_set: ProcessSet, group: Group | None
) -> Handle:
    """Start gathering a tensor; the result is all ranks' rows, and the number from each rank.

    A scalar counts as one row.
    """
    rows = tensor if adapter.checked(tensor).ndim else tensor.reshape(1)
    readable = adapter.readable(rows)
    return ops.exchange(
        "allgather",
        _moved_buffer_of(adapter, readable),
        name=name,
        process_set=process_set,
        group=group,
        result=_with_rows(adapter, readable, tensor),
    )


def start_broadcast(
    adapter: Adapter,
    tensor: Any,
    root_rank: int,
    name: str,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
) -> Handle:
    """Start replacing a tensor by root_rank's, or a copy of it."""
    readable = adapter.readable(adapter.checked(tensor))
    if not in_place and adapter.shares(readable, tensor):
        readable = adapter.copied(readable)
    return ops.broadcast(
        _moved_buffer_of(adapter, readable),
        root_rank=root_rank,
        name=name,
        process_set=process_set,
        result=lambda: adapter.delivered(readable, tensor, tensor if in_place else None),
    )


def start_alltoall(
    adapter: Adapter,
    tensor: Any,
    splits: Sequence[int] | None,
    name: str,
    process_set: ProcessSet,
) -> Handle:
    """Start exchanging rows; the result is the received rows, and the number from each rank."""
    readable = adapter.readable(as_rows(adapter.checked(tensor), "alltoall"))
    return ops.exchange(
        "alltoall",
        _moved_buffer_of(adapter, readable),
        splits=ops.checked_splits(readable.shape[0], splits, process_set),
        name=name,
        process_set=process_set,
        result=_with_rows(adapter, readable, tensor),
    )


def _with_rows(adapter: Adapter, readable: Any, tensor: Any) -> ops.Making:
    return lambda received: (
        adapter.delivered(_made(adapter, received, readable), tensor),
        received.rows,
    )


def _made(adapter: Adapter, received: ops.Received, readable: Any) -> Any:
    """Return the result of an exchange as a tensor in the memory where ``readable`` is."""
    if adapter.device(readable)[0] < 0:
        return adapter.from_core(received, readable)
    made = adapter.new_like(readable, received.shape[0])
    received.copy_to(_moved_buffer_of(adapter, made))
    return made


def _together(members: Sequence[Any], name: str, grouped: bool, start: Any) -> Handle:
    """Start the operations of a call, which complete or fail together if they are grouped."""
    names, group = [name], None
    if grouped:
        names, group = ops.member_names(name, len(members)), Group(name, len(members))
    return Handle.together([start(m, n, group) for m, n in zip(members, names, strict=True)])
