"""Blocking collectives over MXNet arrays, bypassing MXNet's engine, by DLPack and numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from qsgd_hpc import arrays
from qsgd_hpc.arrays import Compression
from qsgd_hpc.errors import UsageError
from qsgd_hpc.runtime.ops import Op
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather", "allreduce", "allreduce_", "alltoall", "broadcast", "broadcast_",
    "grouped_allgather", "grouped_allreduce", "grouped_allreduce_", "grouped_reducescatter",
    "reducescatter",
]  # fmt: skip


class _Producer:
    """The two methods of the DLPack protocol, which MXNet 1.9 lacks although it has capsules."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        # Blocks until no pending operation of MXNet reads or writes the array.
        return self._tensor.to_dlpack_for_write()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the host


class _Memory:
    """Writable memory for numpy, because numpy 1.23 makes all DLPack arrays read-only."""

    def __init__(self, view: NDArray[Any]) -> None:
        self.__array_interface__ = {**view.__array_interface__, "data": (view.ctypes.data, False)}
        self._view = view  # keeps the memory alive


def on_host(tensor: Any) -> Any:
    """Return the array itself, or a copy on the host if it is on a GPU.

    Raises:
        UsageError: not an array of MXNet.
    """
    if not isinstance(tensor, mx.nd.NDArray):
        raise UsageError(
            f"collectives of qsgd_hpc.mxnet take arrays of MXNet, not a {type(tensor).__name__}; "
            "pass mx.nd.array(values)"
        )
    return tensor if tensor.ctx.device_type.startswith("cpu") else tensor.as_in_context(mx.cpu())


def view_of(tensor: Any) -> NDArray[Any]:
    """Wait for pending operations on a host array, and return numpy's view of it.

    The array must not be used while the view is in use.

    Raises:
        UsageError: a bool array, which MXNet exports as single bits.
    """
    if tensor.dtype == np.bool_:
        raise UsageError("bool arrays of MXNet cannot be sent; pass tensor.astype('uint8')")
    return np.asarray(_Memory(np.from_dlpack(_Producer(tensor))))


def as_tensor(result: NDArray[Any], like: Any) -> Any:
    """Return a result as an MXNet array of the same kind and on the same device as ``like``."""
    module = mx.np if isinstance(like, mx.np.ndarray) else mx.nd
    return module.array(result, dtype=result.dtype, ctx=like.ctx)


def _made(call: Callable[..., Any], tensor: Any, *arguments: Any, **options: Any) -> Any:
    """Return the result of a collective of :mod:`qsgd_hpc.arrays` on a tensor."""
    return as_tensor(call(view_of(on_host(tensor)), *arguments, **options), tensor)


def _all_made(call: Callable[..., Any], tensors: Sequence[Any], **options: Any) -> list[Any]:
    results = call([view_of(on_host(tensor)) for tensor in tensors], **options)
    return [as_tensor(result, like) for result, like in zip(results, tensors, strict=True)]


def _replaced(call: Callable[..., Any], tensor: Any, *arguments: Any, **options: Any) -> Any:
    """Execute a collective that replaces a tensor's values, and return the tensor."""
    host = on_host(tensor)
    call(view_of(host), *arguments, **options)
    return tensor if host is tensor else host.copyto(tensor)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Op | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Return the average (or ``op``) of every rank's ``tensor``; shapes must be equal.

    Args:
        tensor: any numeric type; unchanged.
        average: deprecated: ``op=hvd.Average`` (True) or ``op=hvd.Sum`` (False).
        name: pairs the calls of the ranks; default: by order.
        priority: accepted for compatibility; the engine executes whatever is ready on all ranks.
        prescale_factor: multiplies every rank's tensor before the sum.
        postscale_factor: multiplies the result.
        process_set: the participating ranks; default: all.
        op: Average (default), Sum, Min, Max, Product or Adasum.
        compression: one of ``hvd.Compression``.
    Raises:
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    return _made(
        arrays.allreduce, tensor, name=name, average=average, op=op,
        prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        process_set=process_set, compression=compression,
    )  # fmt: skip


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Op | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Replace ``tensor`` by the average (or ``op``) over the ranks; see :func:`allreduce`."""
    return _replaced(
        arrays.allreduce_, tensor, name=name, average=average, op=op,
        prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        process_set=process_set, compression=compression,
    )  # fmt: skip


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Op | None = None,
) -> list[Any]:
    """Reduce several tensors, which complete or fail together; see :func:`allreduce`."""
    return _all_made(
        arrays.grouped_allreduce, tensors, name=name, average=average, op=op,
        prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        process_set=process_set,
    )  # fmt: skip


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Op | None = None,
) -> Sequence[Any]:
    """Replace several tensors by their reductions; see :func:`grouped_allreduce`."""
    hosts = [on_host(tensor) for tensor in tensors]
    arrays.grouped_allreduce_(
        [view_of(host) for host in hosts], name=name, average=average, op=op,
        prescale_factor=prescale_factor, postscale_factor=postscale_factor,
        process_set=process_set,
    )  # fmt: skip
    for host, tensor in zip(hosts, tensors, strict=True):
        if host is not tensor:
            host.copyto(tensor)
    return tensors


def allgather(
    tensor: Any,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return every rank's ``tensor``, concatenated in rank order; numbers of rows may differ."""
    return _made(arrays.allgather, tensor, name, process_set)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several tensors, which complete or fail together; see :func:`allgather`."""
    return _all_made(arrays.grouped_allgather, tensors, name=name, process_set=process_set)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return root_rank's ``tensor``; shapes must be equal."""
    return _made(arrays.broadcast, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Replace ``tensor`` by root_rank's; shapes must be equal."""
    return _replaced(arrays.broadcast_, tensor, root_rank, name, process_set)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send some rows of ``tensor`` to each rank; return the received rows, in rank order.

    With ``splits``, the number of rows for each rank, also return the number of rows from each.
    """
    if splits is None:
        return _made(arrays.alltoall, tensor, None, name, process_set)
    counts = splits.asnumpy() if hasattr(splits, "asnumpy") else splits
    made, received = arrays.alltoall(view_of(on_host(tensor)), counts, name, process_set)
    return as_tensor(made, tensor), as_tensor(received, tensor)


def reducescatter(
    tensor: Any,
    op: Op | None = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's rows of the average (or ``op``) of all ranks' tensors."""
    return _made(
        arrays.reducescatter, tensor, name=name, op=op, process_set=process_set,
        prescale_factor=prescale_factor, postscale_factor=postscale_factor,
    )  # fmt: skip


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: Op | None = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce and scatter several tensors, which complete or fail together."""
    return _all_made(
        arrays.grouped_reducescatter, tensors, name=name, op=op,
        process_set=process_set, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )  # fmt: skip
