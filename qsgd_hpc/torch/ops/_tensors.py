"""The way of a torch tensor to the core and back."""

from __future__ import annotations

import torch

from qsgd_hpc import ops
from qsgd_hpc.errors import UsageError

__all__ = [
    "as_rows",
    "buffer_of",
    "deliver",
    "moved_buffer_of",
    "moved_to",
    "name_of",
    "new_like",
    "on_host",
    "tensor_from",
]

# Types that the core does not compute with travel as integers of their size.
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_KNOWN = {
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values where the core can read them: contiguous, on the CPU.

    It shares the tensor's memory where that is so already.
    """
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"a {tensor.layout} tensor has no one block of memory to send; pass tensor.to_dense(), "
            "or reduce it with hvd.sparse_allreduce_async"
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.device.type != "cuda":
        return plain.cpu().contiguous()
    # From pinned memory a copy runs at full speed; its stream must have come to the end of it.
    host = torch.empty(plain.shape, dtype=plain.dtype, pin_memory=True)
    host.copy_(plain, non_blocking=True)
    torch.cuda.current_stream(plain.device).synchronize()
    return host


def name_of(dtype: torch.dtype) -> str:
    """Return a type's name as the core and numpy spell it."""
    return str(dtype).removeprefix("torch.")


def buffer_of(host: torch.Tensor) -> ops.Buffer:
    """Describe to the core what it is to compute with."""
    dtype = "uint8" if host.dtype == torch.bool else name_of(host.dtype)
    return ops.Buffer(host.data_ptr(), host.shape, dtype, host)


def moved_buffer_of(host: torch.Tensor) -> ops.Buffer:
    """Describe to the core what it moves without computing: any type will do."""
    if host.dtype in _KNOWN:
        return buffer_of(host)
    size = host.element_size()
    if size in _SAME_SIZE:
        return ops.Buffer(host.data_ptr(), host.shape, name_of(_SAME_SIZE[size]), host)
    return ops.Buffer(host.data_ptr(), (*host.shape, size // 8), "int64", host)


def as_rows(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    """Return the tensor, which must have a first dimension to be cut along."""
    if tensor.dim() == 0:
        raise UsageError(
            f"{operation} cuts tensors along their first dimension, and a scalar has none; pass "
            "tensor.reshape(1)"
        )
    return tensor


def tensor_from(received: ops.Received, like: torch.Tensor) -> torch.Tensor:
    """Return what the core has made, with the type and device of ``like``; it keeps the memory."""
    flat = torch.from_numpy(received.data).view(like.dtype)
    view = flat.reshape(received.shape[0], *like.shape[1:])
    # Autograd would not let a script change a view in place.
    return moved_to(like.device, torch.empty(0, dtype=like.dtype).set_(view))  # type: ignore[call-overload]


def moved_to(device: torch.device, host: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor on the CPU on a device; itself where that is the CPU."""
    return host.to(device, non_blocking=device.type == "cuda" and host.is_pinned())


def deliver(
    result: torch.Tensor, tensor: torch.Tensor, output: torch.Tensor | None
) -> torch.Tensor:
    """Return the result in ``output``, or with the type and device of ``tensor``."""
    if output is None:
        if (result.device, result.dtype) == (tensor.device, tensor.dtype):
            return result
        return moved_to(tensor.device, result).to(tensor.dtype)
    same = (result.data_ptr(), result.dtype, result.shape, result.stride()) == (
        output.data_ptr(), output.dtype, output.shape, output.stride()
    )  # fmt: skip
    if not same:  # a compressor may return anything
        with torch.no_grad():
            output.copy_(result, non_blocking=output.is_cuda)
    return output


def new_like(host: torch.Tensor) -> torch.Tensor:
    """Return memory for a result, pinned where the source is."""
    return torch.empty_like(host, pin_memory=host.is_pinned())
