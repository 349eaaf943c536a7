"""The way of a tensor of toyframe to the core and back."""

from __future__ import annotations

from qsgd_hpc.frameworks.adapter import Adapter
from qsgd_hpc.runtime import ops
from toyframe import Tensor, empty

__all__ = ["TENSORS"]


class _Tensors(Adapter):
    def on_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def shares(self, host: Tensor, tensor: Tensor) -> bool:
        return host.data_ptr() == tensor.data_ptr()

    def dtype(self, tensor: Tensor) -> str:
        return tensor.dtype

    def itemsize(self, host: Tensor) -> int:
        return host.element_size()

    def address(self, host: Tensor) -> int:
        return host.data_ptr()

    def cast(self, host: Tensor, dtype: str) -> Tensor:
        return host.to(dtype)

    def new_like(self, host: Tensor) -> Tensor:
        return empty(host.shape, host.dtype)

    def copied(self, host: Tensor) -> Tensor:
        return host.to(host.dtype)

    def taken(self, received: ops.Received, like: Tensor) -> Tensor:
        return Tensor(received.data.view(like.dtype)).reshape(received.shape[0], *like.shape[1:])

    def delivered(self, result: Tensor, like: Tensor, into: Tensor | None = None) -> Tensor:
        if into is None:
            return result.to(like.dtype)
        into.copy_(result)
        return into


TENSORS = _Tensors()
