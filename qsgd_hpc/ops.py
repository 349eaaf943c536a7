"""Handles over (pointer, shape, dtype): what the framework modules build their calls on."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qsgd_hpc import basics
from qsgd_hpc.compression import Coding

__all__ = ["Average", "Handle", "Max", "Min", "Op", "Product", "Sum", "allreduce", "broadcast"]


@dataclass(frozen=True)
class Op:
    """A reduction."""

    name: str

    def __repr__(self) -> str:
        return self.name.capitalize()


Average = Op("average")
Sum = Op("sum")
Min = Op("min")
Max = Op("max")
Product = Op("product")

# What the core may still read or write, whether or not anybody waits for it.
_in_flight: set[Handle] = set()


class Handle:
    """An operation under way.

    Its tensors live until the core has done with them, even if the handle is dropped or the wait
    interrupted; after a rank has died that is for ever, because MPI may still write to them.
    """

    def __init__(self, core: Any, keep: Any, result: Callable[[], Any]) -> None:
        self._core = core
        self._keep = keep
        self._result = result
        for old in [h for h in _in_flight if h._core.done() and not h._core.lost()]:
            _in_flight.discard(old)
        _in_flight.add(self)

    def done(self) -> bool:
        """Tell whether ``wait`` would return at once."""
        return bool(self._core.done())

    def wait(self) -> Any:
        """Return the result.

        Raises:
            HorovodInternalError: the ranks disagree, a rank died, or a gradient is not finite.
        """
        self._core.wait()
        _in_flight.discard(self)
        return self._result()

    def then(self, convert: Callable[[Any], Any]) -> Handle:
        """Return this handle with its result converted."""
        result = self._result
        self._result = lambda: convert(result())
        return self


@dataclass(frozen=True)
class Buffer:
    """Contiguous memory of a framework's tensor."""

    pointer: int
    shape: Sequence[int]
    dtype: str
    owner: Any
    """Keeps the memory alive."""


def _name(kind: str, name: str | None) -> str:
    # Ranks number unnamed operations alike because they call them in one order.
    return f"{kind}.{name}" if name else f"{kind}.noname.{basics.next_number(kind)}"


def allreduce(
    source: Buffer,
    target: Buffer,
    *,
    name: str | None,
    op: Op,
    prescale: float = 1.0,
    postscale: float = 1.0,
    coding: Coding | None = None,
    check_finite: bool = False,
    result: Callable[[], Any],
) -> Handle:
    """Start reducing ``source`` over all ranks into ``target`` (which may be the same memory)."""
    core = basics.context().engine.allreduce(
        name=_name("allreduce", name),
        source=source.pointer,
        target=target.pointer,
        shape=list(source.shape),
        dtype=source.dtype,
        op=op.name,
        prescale=prescale,
        postscale=postscale,
        coding=coding,
        check_finite=check_finite,
    )
    return Handle(core, (source.owner, target.owner), result)


def broadcast(
    target: Buffer, *, root_rank: int, name: str | None, result: Callable[[], Any]
) -> Handle:
    """Start replacing ``target`` by root_rank's, on every rank."""
    core = basics.context().engine.broadcast(
        name=_name("broadcast", name),
        target=target.pointer,
        shape=list(target.shape),
        dtype=target.dtype,
        root=root_rank,
    )
    return Handle(core, target.owner, result)


def broadcast_object(obj: Any, root_rank: int, name: str | None) -> Any:
    """Return root_rank's ``obj`` on every rank; it must be picklable."""
    import numpy as np

    label = name or f"object.{basics.next_number('object')}"
    mine = basics.rank() == root_rank
    data = np.frombuffer(pickle.dumps(obj), dtype=np.uint8).copy() if mine else None
    length = np.array([0 if data is None else data.size], dtype=np.int64)
    _broadcast_array(length, root_rank, f"{label}.length")
    if data is None:
        data = np.empty(int(length[0]), dtype=np.uint8)
    _broadcast_array(data, root_rank, f"{label}.data")
    return obj if mine else pickle.loads(data.tobytes())


def _broadcast_array(array: Any, root_rank: int, name: str) -> None:
    buffer = Buffer(array.ctypes.data, array.shape, str(array.dtype), array)
    broadcast(buffer, root_rank=root_rank, name=name, result=lambda: None).wait()


def barrier() -> None:
    """Return when every rank has come here."""
    import numpy as np

    flag = np.zeros(1, dtype=np.int32)
    buffer = Buffer(flag.ctypes.data, flag.shape, "int32", flag)
    name = f"barrier.{basics.next_number('barrier')}"
    allreduce(buffer, buffer, name=name, op=Sum, result=lambda: None).wait()
