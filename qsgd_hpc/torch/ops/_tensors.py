"""Conversion of torch tensors to the core's memory and back."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.adapter import Adapter
from qsgd_hpc.runtime import ops

__all__ = ["TENSORS", "name_of"]


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """Return a type's name as the core and numpy spell it."""
    return str(dtype).removeprefix("torch.")


class _Tensors(Adapter):
    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values, contiguous on the CPU.

        Raises:
            UsageError: it is not contiguous memory.
        """
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"a {tensor.layout} tensor has no contiguous memory to send; pass "
                "tensor.to_dense(), or reduce it with hvd.sparse_allreduce_async"
            )
        plain = tensor.detach().resolve_conj().resolve_neg()
        if plain.device.type != "cuda":
            return plain.cpu().contiguous()
        # From pinned memory a copy runs at full speed; its stream must have come to the end of it.
        host = torch.empty(plain.shape, dtype=plain.dtype, pin_memory=True)
        host.copy_(plain, non_blocking=True)
        torch.cuda.current_stream(plain.device).synchronize()
        return host

    def shares(self, host: torch.Tensor, tensor: torch.Tensor) -> bool:
        return host.data_ptr() == tensor.data_ptr()

    def dtype(self, tensor: torch.Tensor) -> str:
        return name_of(tensor.dtype)

    def itemsize(self, host: torch.Tensor) -> int:
        return host.element_size()

    def address(self, host: torch.Tensor) -> int:
        return host.data_ptr()

    def cast(self, host: torch.Tensor, dtype: str) -> torch.Tensor:
        return host.to(getattr(torch, dtype))

    def new_like(self, host: torch.Tensor) -> torch.Tensor:
        """Return new memory, pinned if the source is."""
        return torch.empty_like(host, pin_memory=host.is_pinned())

    def copied(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def taken(self, received: ops.Received, like: torch.Tensor) -> torch.Tensor:
        flat = torch.from_numpy(received.data).view(like.dtype)
        view = flat.reshape(received.shape[0], *like.shape[1:])
        # Autograd would not let a script change a view in place.
        return torch.empty(0, dtype=like.dtype).set_(view)  # type: ignore[call-overload,no-any-return]

    def delivered(
        self, result: torch.Tensor, like: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        if into is None:
            if (result.device, result.dtype) == (like.device, like.dtype):
                return result
            return self.placed(result, like.device).to(like.dtype)
        same = (result.data_ptr(), result.dtype, result.shape, result.stride()) == (
            into.data_ptr(), into.dtype, into.shape, into.stride()
        )  # fmt: skip
        if not same:  # a compressor may return anything
            with torch.no_grad():
                into.copy_(result, non_blocking=into.is_cuda)
        return into

    def bare(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def place(self, tensor: torch.Tensor) -> torch.device:
        """Return the device, which may have more memory than the host."""
        return tensor.device

    def placed(self, host: torch.Tensor, place: torch.device) -> torch.Tensor:
        return host.to(place, non_blocking=place.type == "cuda" and host.is_pinned())

    def unrecorded(self) -> AbstractContextManager[Any]:
        return torch.no_grad()


TENSORS = _Tensors()
"""The adapter of torch's tensors."""
