"""Collectives over (pointer, shape, dtype): what the framework modules build their calls on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qsgd_hpc import basics
from qsgd_hpc._handle import Handle
from qsgd_hpc.compression import facts_of
from qsgd_hpc.errors import UsageError
from qsgd_hpc.process_sets import ProcessSet, global_process_set, require_member

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from qsgd_hpc.compression import Coding

__all__ = [
    "Adasum",
    "Average",
    "Buffer",
    "Group",
    "Handle",
    "Max",
    "Min",
    "Op",
    "Product",
    "Received",
    "Sum",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "join",
    "label",
    "member_names",
    "poll",
    "prepare_gradient_allreduce",
    "ranks_of",
    "reducescatter",
    "run_now",
    "synchronize",
]


@dataclass(frozen=True)
class Op:
    """A reduction."""

    name: str

    def __repr__(self) -> str:
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


@dataclass
class Buffer:
    """Contiguous memory of a framework's tensor."""

    pointer: int
    shape: Sequence[int]
    dtype: str
    owner: Any
    """Keeps the memory alive."""


@dataclass(frozen=True)
class Received:
    """What a collective has made whose result is larger or smaller than what went in."""

    data: NDArray[Any]
    """uint8, one dimension; owns the memory."""
    shape: list[int]
    rows: list[int]
    """From each rank of the process set, for allgather and alltoall."""


@dataclass(frozen=True)
class Group:
    """Operations that become ready, and complete or fail, together."""

    name: str
    size: int


Result = Callable[[], Any]
Making = Callable[[Received], Any]


def ranks_of(process_set: ProcessSet) -> list[int]:
    """Return the ranks of a set that this rank is in."""
    require_member(process_set)
    return process_set.ranks or []


def label(kind: str, name: str | None, process_set: ProcessSet = global_process_set) -> str:
    """Return the name, or a number that is equal on ranks which call in one order."""
    if name:
        return name
    number = require_member(process_set)
    where = f"set{number}." if number else ""
    return f"noname.{where}{basics.next_number(f'{kind}.{number}')}"


def member_names(name: str, count: int) -> list[str]:
    """Return the names of a group's operations."""
    return [f"{name}.{i}" for i in range(count)]


class _Now(threading.local):
    on = False


_now = _Now()


def run_now(start: Callable[..., Handle], *args: Any, **options: Any) -> Any:
    """Return the result of the operation that ``start`` starts.

    The calling thread carries it out itself, where that is quicker than to wake the engine's.
    """
    _now.on = True
    try:
        handle = start(*args, **options)
    finally:
        _now.on = False
    return handle.wait()


def _received(core: Any, result: Making) -> Any:
    return result(Received(core.output(), list(core.shape()), list(core.sizes())))


def _common(kind: str, name: str | None, process_set: ProcessSet) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": f"{kind}.{label(kind, name, process_set)}"}
    if number := require_member(process_set):
        facts["process_set"] = number
    return facts


def _grouped(group: Group | None) -> dict[str, Any]:
    return {"group": group.name, "group_size": group.size} if group else {}


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
    lasting: bool | None = None,
    process_set: ProcessSet = global_process_set,
    group: Group | None = None,
    result: Result,
) -> Handle:
    """Start reducing ``source`` over the ranks into ``target`` (which may be the same memory).

    ``lasting`` says whether the name comes again, so that the engine keeps what it learns of it;
    by default every given name does.
    """
    core = basics.context().engine.allreduce(
        **_facts(source.shape, source.dtype, name, op, coding, process_set, group),
        source=source.pointer,
        target=target.pointer,
        prescale=prescale,
        postscale=postscale,
        lasting=name is not None if lasting is None else lasting,
        check_finite=check_finite,
        keep=(source.owner, target.owner),
        now=_now.on and not group,  # members of a group wait for one another
    )
    return Handle([core], result)


def _facts(
    shape: Sequence[int],
    dtype: str,
    name: str | None,
    op: Op,
    coding: Coding | None,
    process_set: ProcessSet,
    group: Group | None,
) -> dict[str, Any]:
    return {
        **_common("allreduce", name, process_set),
        **_grouped(group),
        "shape": list(shape),
        "dtype": dtype,
        "op": op.name,
        **facts_of(coding),
    }


def prepare_gradient_allreduce(
    shape: Sequence[int],
    dtype: str,
    *,
    name: str,
    op: Op,
    prescale: float,
    postscale: float,
    coding: Coding | None,
    process_set: ProcessSet,
    group: Group | None,
) -> Any:
    """Return the core's allreduce of a gradient, which can be started in every step.

    ``start(source, target, keep)`` takes pointers, and what keeps the memory alive; it returns the
    core's handle. It is of no use after ``shutdown``.
    """
    return basics.context().engine.prepare_allreduce(
        **_facts(shape, dtype, name, op, coding, process_set, group),
        prescale=prescale,
        postscale=postscale,
        check_finite=True,
    )


def broadcast(
    target: Buffer,
    *,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet = global_process_set,
    result: Result,
) -> Handle:
    """Start replacing ``target`` by root_rank's, on every rank of the set.

    ``root_rank`` counts all ranks of the job, whatever the set.
    """
    core = basics.context().engine.broadcast(
        **_common("broadcast", name, process_set),
        target=target.pointer,
        shape=list(target.shape),
        dtype=target.dtype,
        root=root_rank,
        keep=target.owner,
        now=_now.on,
    )
    return Handle([core], result)


def allgather(
    source: Buffer,
    *,
    name: str | None,
    process_set: ProcessSet = global_process_set,
    group: Group | None = None,
    result: Making,
) -> Handle:
    """Start gathering every rank's rows, in rank order; only their numbers may differ.

    ``source`` has at least one dimension.
    """
    core = basics.context().engine.allgather(
        **_common("allgather", name, process_set),
        **_grouped(group),
        source=source.pointer,
        shape=list(source.shape),
        dtype=source.dtype,
        keep=source.owner,
        now=_now.on and not group,
    )
    return Handle([core], lambda: _received(core, result))


def alltoall(
    source: Buffer,
    *,
    splits: Sequence[int] | None = None,
    name: str | None,
    process_set: ProcessSet = global_process_set,
    result: Making,
) -> Handle:
    """Start sending ``splits[i]`` rows to the i-th rank of the set; None sends as many to each.

    Raises:
        UsageError: splits that do not add up to the rows there are.
    """
    core = basics.context().engine.alltoall(
        **_common("alltoall", name, process_set),
        source=source.pointer,
        shape=list(source.shape),
        dtype=source.dtype,
        splits=_checked_splits(source.shape, splits, ranks_of(process_set)),
        keep=source.owner,
        now=_now.on,
    )
    return Handle([core], lambda: _received(core, result))


def _checked_splits(
    shape: Sequence[int], splits: Sequence[int] | None, ranks: Sequence[int]
) -> list[int]:
    me, rows = basics.rank(), shape[0]
    if splits is None:
        if rows % len(ranks):
            raise UsageError(
                f"rank {me}: alltoall of {rows} rows over {len(ranks)} ranks: pass splits=, or "
                "rows that divide evenly"
            )
        return [rows // len(ranks)] * len(ranks)
    counts = [int(n) for n in splits]
    if len(counts) != len(ranks) or min(counts) < 0 or sum(counts) != rows:
        raise UsageError(
            f"rank {me}: alltoall with splits={counts} of {rows} rows over {len(ranks)} ranks: "
            "give one number of rows per rank, none negative, that add up to the rows"
        )
    return counts


def reducescatter(
    source: Buffer,
    *,
    name: str | None,
    op: Op,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
    group: Group | None = None,
    result: Making,
) -> Handle:
    """Start reducing ``source`` over the ranks; each gets its share of the rows of the result.

    The rows are cut as evenly as possible, and the first ranks get one more.
    """
    core = basics.context().engine.reducescatter(
        **_common("reducescatter", name, process_set),
        **_grouped(group),
        source=source.pointer,
        shape=list(source.shape),
        dtype=source.dtype,
        op=op.name,
        prescale=prescale,
        postscale=postscale,
        keep=source.owner,
        now=_now.on and not group,
    )
    return Handle([core], lambda: _received(core, result))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has come here."""
    core = basics.context().engine.barrier(**_common("barrier", None, process_set))
    Handle([core], lambda: None).wait()


def join() -> int:
    """Say that this rank has no more data; return, when all have said so, who was last.

    Until then this rank takes part in the others' allreduces with zeros.
    """
    core = basics.context().engine.join()
    last: int = Handle([core], core.result).wait()
    return last


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous operation and return its result."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Tell whether ``synchronize`` would return at once."""
    return handle.done()
