"""Conversion of torch tensors to the core's memory and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.adapter import Adapter
from qsgd_hpc.runtime import gpu, ops

__all__ = ["TENSORS", "current_stream", "current_stream_of", "device_of", "name_of", "used_here"]

# Returns the address of the current stream of a device, given by its number. A torch without GPU
# support lacks this function, and has no tensors on devices.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """Return a type's name in numpy and in the core."""
    return str(dtype).removeprefix("torch.")


def device_of(tensor: torch.Tensor) -> int | None:
    """Return the device from which the core can read a tensor; -1: host; None: it needs a copy."""
    served = gpu.served()
    if tensor.is_cpu:
        return 0 if served == "cpu" else -1  # the kernels' twin treats the host as a device
    number = tensor.get_device()
    return number if tensor.is_cuda and served == "cuda" and gpu.serves(number) else None


def current_stream_of(tensor: torch.Tensor) -> int:
    """Return the address of the stream that is current on a tensor's device."""
    return current_stream(tensor.get_device()) if tensor.is_cuda else 0


def used_here(tensor: torch.Tensor) -> torch.Tensor:
    """Record that the current stream uses a tensor, possibly of another stream; return it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


class _Tensors(Adapter):
    def checked(self, tensor: Any) -> torch.Tensor:
        if isinstance(tensor, torch.Tensor):
            return tensor
        raise UsageError(
            f"expected a torch.Tensor, not {type(tensor).__name__}; convert numbers and arrays "
            "with torch.as_tensor(), and send other objects with hvd.broadcast_object or "
            "hvd.allgather_object"
        )

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values, contiguous: on the GPU if there are kernels, otherwise on the host.

        Raises:
            UsageError: the tensor's layout has no contiguous memory.
        """
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"a {tensor.layout} tensor has no contiguous memory to send; pass "
                "tensor.to_dense(), or reduce it with hvd.sparse_allreduce_async"
            )
        plain = tensor.detach().resolve_conj().resolve_neg()
        if device_of(plain) is not None:
            return plain.contiguous()
        if not plain.is_cuda:
            return plain.cpu().contiguous()
        # A copy to pinned memory runs at full speed; the host must wait until it is complete.
        host = torch.empty(plain.shape, dtype=plain.dtype, device="cpu", pin_memory=True)
        host.copy_(plain, non_blocking=True)
        torch.cuda.current_stream(plain.device).synchronize()
        return host

    def shares(self, readable: torch.Tensor, tensor: torch.Tensor) -> bool:
        return readable.data_ptr() == tensor.data_ptr()

    def dtype(self, tensor: torch.Tensor) -> str:
        return name_of(tensor.dtype)

    def itemsize(self, readable: torch.Tensor) -> int:
        return readable.element_size()

    def address(self, readable: torch.Tensor) -> int:
        return readable.data_ptr()

    def device(self, readable: torch.Tensor) -> tuple[int, int]:
        """Return a tensor's device, and the device's current stream."""
        number = device_of(readable)
        assert number is not None
        return number, current_stream_of(readable)

    def cast(self, readable: torch.Tensor, dtype: str) -> torch.Tensor:
        return readable.to(getattr(torch, dtype))

    def new_like(self, readable: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        """Return new memory, pinned if the source is."""
        if rows is not None:
            return readable.new_empty((rows, *readable.shape[1:]))
        pinned = readable.is_cpu and readable.is_pinned()
        return torch.empty_like(readable, pin_memory=pinned)

    def copied(self, readable: torch.Tensor) -> torch.Tensor:
        return readable.clone()

    def from_core(self, received: ops.Received, like: torch.Tensor) -> torch.Tensor:
        flat = torch.from_numpy(received.data).view(like.dtype)
        view = flat.reshape(received.shape[0], *like.shape[1:])
        # Not a view, because autograd would forbid a script to change a view in place.
        empty = torch.empty(0, dtype=like.dtype, device="cpu")
        return empty.set_(view)  # type: ignore[call-overload,no-any-return]

    def delivered(
        self, result: torch.Tensor, like: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        if into is None:
            if (result.device, result.dtype) == (like.device, like.dtype):
                return used_here(result)
            return self.placed(result, like.device).to(like.dtype)
        same = (result.data_ptr(), result.dtype, result.shape, result.stride()) == (
            into.data_ptr(), into.dtype, into.shape, into.stride()
        )  # fmt: skip
        if not same:  # a compressor may return anything
            with torch.no_grad():
                into.copy_(used_here(result), non_blocking=into.is_cuda)
        return into

    def detached(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def place(self, tensor: torch.Tensor) -> torch.device:
        """Return the tensor's device."""
        return tensor.device

    def placed(self, readable: torch.Tensor, place: torch.device) -> torch.Tensor:
        if readable.device == place:
            return used_here(readable)
        return readable.to(place, non_blocking=place.type == "cuda" and readable.is_pinned())

    def unrecorded(self) -> AbstractContextManager[Any]:
        return torch.no_grad()


TENSORS = _Tensors()
"""The adapter of torch's tensors."""
