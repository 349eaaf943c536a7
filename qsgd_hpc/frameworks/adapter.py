"""The interface through which collectives access a framework's tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsgd_hpc.runtime.ops import Received

__all__ = ["Adapter"]


class Adapter(ABC):
    """Conversion of one framework's tensors to the core's memory and back.

    A tensor is *readable* if the core can read it: contiguous, in host memory or in the memory of
    a GPU for which this installation has kernels. Others are copied. Types are numpy's names.
    """

    word = "tensor"
    """The framework's word for a tensor."""
    conversion = "to()"
    """The call that converts a tensor to another type."""
    reduces_complex = False
    """Whether complex elements can be added, each as two floats."""

    def checked(self, tensor: Any) -> Any:
        """Return what a caller has passed, if it is a tensor.

        Raises:
            UsageError: it is something else, which the framework does not convert by itself.
        """
        return tensor

    @abstractmethod
    def readable(self, tensor: Any) -> Any:
        """Return a readable tensor of the same values, without a copy if possible."""

    @abstractmethod
    def shares(self, readable: Any, tensor: Any) -> bool:
        """Return whether a readable tensor shares the memory of ``tensor``."""

    @abstractmethod
    def dtype(self, tensor: Any) -> str:
        """Return the type of the elements."""

    @abstractmethod
    def itemsize(self, readable: Any) -> int:
        """Return the bytes of an element."""

    @abstractmethod
    def address(self, readable: Any) -> int:
        """Return the address of a readable tensor."""

    def device(self, readable: Any) -> tuple[int, int]:
        """Return the number of the tensor's device (-1: host) and the stream that writes to it."""
        return -1, 0

    def owner(self, readable: Any) -> Any:
        """Return an object that keeps the memory valid and unchanged during the operation."""
        return readable

    @abstractmethod
    def cast(self, readable: Any, dtype: str) -> Any:
        """Return a readable tensor's values in another type, on the same device."""

    @abstractmethod
    def new_like(self, readable: Any, rows: int | None = None) -> Any:
        """Return an empty readable tensor of the same type, device and shape, but for its rows."""

    @abstractmethod
    def copied(self, readable: Any) -> Any:
        """Return a copy of a readable tensor, on the same device."""

    @abstractmethod
    def from_core(self, received: Received, like: Any) -> Any:
        """Return host memory that the core allocated as a tensor of ``like``'s type.

        The tensor keeps the memory alive.
        """

    @abstractmethod
    def delivered(self, result: Any, like: Any, into: Any = None) -> Any:
        """Return a result in ``into``, or with the type and device of ``like``."""

    def detached(self, tensor: Any) -> Any:
        """Return a tensor without the framework's gradient record."""
        return tensor

    def place(self, tensor: Any) -> Any:
        """Return the device of a tensor, for ``placed``."""
        return None

    def placed(self, readable: Any, place: Any) -> Any:
        """Return a readable tensor's values on the device of the compressor's result."""
        return readable

    def unrecorded(self) -> AbstractContextManager[Any]:
        """Return a context in which the framework records no gradients."""
        return nullcontext()
