"""A framework that does not exist: one kind of tensor, which speaks no protocol of numpy's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Tensor", "empty"]


class Tensor:
    """Contiguous memory of one type."""

    def __init__(self, values: Any, dtype: str | None = None) -> None:
        self._memory = np.array(values, dtype, order="C")

    @property
    def dtype(self) -> str:
        return str(self._memory.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._memory.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def element_size(self) -> int:
        return self._memory.itemsize

    def data_ptr(self) -> int:
        return self._memory.ctypes.data

    def to(self, dtype: str) -> Tensor:
        return Tensor(self._memory, dtype)

    def reshape(self, *shape: int) -> Tensor:
        return Tensor(self._memory.reshape(shape))

    def copy_(self, other: Tensor) -> None:
        self._memory[...] = other._memory

    def tolist(self) -> Any:
        return self._memory.tolist()


def empty(shape: Sequence[int], dtype: str) -> Tensor:
    return Tensor(np.empty(tuple(shape), dtype))
