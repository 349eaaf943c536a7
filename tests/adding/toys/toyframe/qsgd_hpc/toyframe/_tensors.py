"""The way of a tensor of toyframe to the core and back."""

from __future__ import annotations

from qsgd_hpc.frameworks.adapter import Adapter
from qsgd_hpc.runtime import ops
from toyframe import Tensor, empty

__all__ = ["TENSORS"]


class _Tensors(Adapter):
    def readable(self, tensor: Tensor) -> Tensor:
        return tensor

    def shares(self, readable: Tensor, tensor: Tensor) -> bool:
        return readable.data_ptr() == tensor.data_ptr()

    def dtype(self, tensor: Tensor) -> str:
        return tensor.dtype

    def itemsize(self, readable: Tensor) -> int:
        return readable.element_size()

    def address(self, readable: Tensor) -> int:
        return readable.data_ptr()

    def cast(self, readable: Tensor, dtype: str) -> Tensor:
        return readable.to(dtype)

    def new_like(self, readable: Tensor) -> Tensor:
        return empty(readable.shape, readable.dtype)

    def copied(self, readable: Tensor) -> Tensor:
        return readable.to(readable.dtype)

    def from_core(self, received: ops.Received, like: Tensor) -> Tensor:
        return Tensor(received.data.view(like.dtype)).reshape(received.shape[0], *like.shape[1:])

    def delivered(self, result: Tensor, like: Tensor, into: Tensor | None = None) -> Tensor:
        if into is None:
            return result.to(like.dtype)
        into.copy_(result)
        return into


TENSORS = _Tensors()
