"""Collectives over torch tensors, blocking and asynchronous."""

from __future__ import annotations

from typing import Any

import torch

from qsgd_hpc import ops
from qsgd_hpc.compression import Qsgd
from qsgd_hpc.errors import UsageError
from qsgd_hpc.ops import Average, Handle, Max, Min, Op, Product, Sum
from qsgd_hpc.torch.compression import NoneCompressor

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "poll",
    "synchronize",
]


def buffer_of(tensor: torch.Tensor) -> ops.Buffer:
    """Describe a contiguous CPU tensor to the core."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ops.Buffer(
        tensor.data_ptr(), tensor.shape, "uint8" if dtype == "bool" else dtype, tensor
    )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself where the core can read it, else a contiguous copy on the CPU."""
    if tensor.is_sparse:
        raise UsageError("sparse tensors cannot be reduced; pass tensor.to_dense()")
    return tensor.detach().cpu().contiguous()


def _choose_op(op: Op | None, average: bool | None) -> Op:
    """Resolve ``op`` and the older ``average`` flag."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise UsageError("pass op= or the older average=, not both")
    return Average if average else Sum


_NARROW = {torch.uint8, torch.int8, torch.int16, torch.int32}


def _op_for(dtype: torch.dtype, op: Op) -> Op:
    """Return the reduction that keeps booleans 0 or 1: any for a sum, all for a product."""
    if dtype != torch.bool:
        return op
    if op is Average:
        raise UsageError(
            "bool tensors have no average; pass op=hvd.Sum (any rank) or tensor.float()"
        )
    return {Sum: Max, Product: Min}.get(op, op)


def _deliver(
    result: torch.Tensor, tensor: torch.Tensor, output: torch.Tensor | None
) -> torch.Tensor:
    """Return the result where and as the caller wants it."""
    if output is None:
        return result.to(device=tensor.device, dtype=tensor.dtype)
    same = (result.data_ptr(), result.dtype, result.shape, result.stride()) == (
        output.data_ptr(), output.dtype, output.shape, output.stride()
    )  # fmt: skip
    if not same:  # a compressor may return anything
        with torch.no_grad():
            output.copy_(result)
    return output


def _start(
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    name: str | None,
    op: Op,
    prescale_factor: float,
    postscale_factor: float,
    compression: Any,
    *,
    gradient: bool = False,
) -> Handle:
    """Start a reduction into ``output``, or into a new tensor."""
    source = _on_host(tensor)
    op = _op_for(tensor.dtype, op)
    if op is Average and tensor.dtype in _NARROW:
        # Their sum could wrap before it is divided.
        wide = _start(source.long(), None, name, op, prescale_factor, postscale_factor, compression)
        return wide.then(lambda mean: _deliver(mean, tensor, output))
    coding = None
    context = None
    compressor = compression
    if isinstance(compression, Qsgd):
        compressor = NoneCompressor
        if gradient:
            dtype = str(tensor.dtype).removeprefix("torch.")
            coding = compression.coding_for_gradient(tensor.shape, dtype)
        else:
            coding = compression.coding()
    travelling, context = compressor.compress(source)
    travelling = travelling.contiguous()
    in_place = output is not None and travelling.data_ptr() == output.data_ptr()
    reduced = travelling if in_place else torch.empty_like(travelling)

    def result() -> torch.Tensor:
        back = compressor.decompress(reduced, context)
        return _deliver(back, tensor, output)

    return ops.allreduce(
        buffer_of(travelling),
        buffer_of(reduced),
        name=name,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        coding=coding,
        check_finite=gradient or coding is not None,
        result=result,
    )


def allreduce_gradient_async(gradient: torch.Tensor, name: str, op: Op, compression: Any) -> Handle:
    """Start reducing a gradient in place; QSGD leaves small and one-dimensional ones alone."""
    return _start(gradient, gradient, name, op, 1.0, 1.0, compression, gradient=True)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = NoneCompressor,
) -> Handle:
    """Start an allreduce; ``synchronize`` returns its result as a new tensor."""
    chosen = _choose_op(op, average)
    return _start(tensor, None, name, chosen, prescale_factor, postscale_factor, compression)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = NoneCompressor,
) -> Handle:
    """Start an allreduce that replaces ``tensor``; do not touch it before ``synchronize``."""
    chosen = _choose_op(op, average)
    return _start(tensor, tensor, name, chosen, prescale_factor, postscale_factor, compression)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return the average (or ``op``) of every rank's ``tensor``; shapes must be equal.

    Args:
        tensor: any numeric dtype; unchanged.
        average: the older spelling of ``op=hvd.Average`` (True) and ``op=hvd.Sum`` (False).
        name: pairs the calls of the ranks; by default their order does.
        compression: one of ``hvd.Compression``.
        op: Average (default), Sum, Min, Max or Product. Integers average towards zero.
        prescale_factor: multiplies every rank's tensor before the sum.
        postscale_factor: multiplies the result.
    Raises:
        HorovodInternalError: the ranks' tensors do not fit each other, or a rank died.
    """
    chosen = _choose_op(op, average)
    handle = _start(tensor, None, name, chosen, prescale_factor, postscale_factor, compression)
    reduced: torch.Tensor = handle.wait()
    return reduced


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = NoneCompressor,
) -> torch.Tensor:
    """Replace ``tensor`` by the average (or ``op``) over the ranks; see ``allreduce``."""
    chosen = _choose_op(op, average)
    handle = _start(tensor, tensor, name, chosen, prescale_factor, postscale_factor, compression)
    reduced: torch.Tensor = handle.wait()
    return reduced


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start replacing ``tensor`` by root_rank's."""
    host = _on_host(tensor)
    parts = torch.view_as_real(host.resolve_conj()) if host.is_complex() else host

    def result() -> torch.Tensor:
        return _deliver(host, tensor, tensor)

    return ops.broadcast(buffer_of(parts), root_rank=root_rank, name=name, result=result)


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start a broadcast; ``synchronize`` returns root_rank's tensor as a new one."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Replace ``tensor`` by root_rank's; shapes must be equal."""
    received: torch.Tensor = broadcast_async_(tensor, root_rank, name).wait()
    return received


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return root_rank's ``tensor``; shapes must be equal."""
    received: torch.Tensor = broadcast_async(tensor, root_rank, name).wait()
    return received


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous operation and return its result."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Tell whether ``synchronize`` would return at once."""
    return handle.done()
