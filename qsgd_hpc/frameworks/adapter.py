"""Access of the collectives to a framework's tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsgd_hpc.runtime.ops import Received

__all__ = ["Adapter"]


class Adapter(ABC):
    """Conversion of one framework's tensors to the core's memory and back.

    A *host* is a tensor that the core can read: contiguous, in CPU memory. Tensors
    elsewhere are copied; types have numpy's names.
    """

    word = "tensor"
    """The framework's word for a tensor."""
    conversion = "to()"
    """The call that gives one another type."""
    reduces_complex = False
    """Whether complex elements can be added, each as two floats."""

    @abstractmethod
    def on_host(self, tensor: Any) -> Any:
        """Return a tensor's values as a host, without a copy if possible."""

    @abstractmethod
    def shares(self, host: Any, tensor: Any) -> bool:
        """Return whether a host shares the memory of ``tensor``."""

    @abstractmethod
    def dtype(self, tensor: Any) -> str:
        """Return the type of the elements."""

    @abstractmethod
    def itemsize(self, host: Any) -> int:
        """Return the bytes of an element."""

    def shape(self, host: Any) -> Sequence[int]:
        """Return the shape."""
        shape: Sequence[int] = host.shape
        return shape

    @abstractmethod
    def address(self, host: Any) -> int:
        """Return the address of a host."""

    @abstractmethod
    def cast(self, host: Any, dtype: str) -> Any:
        """Return a host's values in another type."""

    @abstractmethod
    def new_like(self, host: Any) -> Any:
        """Return a host for a result of the same shape and type."""

    @abstractmethod
    def copied(self, host: Any) -> Any:
        """Return a copy of a host."""

    @abstractmethod
    def taken(self, received: Received, like: Any) -> Any:
        """Return memory of the core as a host in the type of ``like``; keeps the memory alive."""

    @abstractmethod
    def delivered(self, result: Any, like: Any, into: Any = None) -> Any:
        """Return a result in ``into``, or with the type and device of ``like``."""

    def bare(self, tensor: Any) -> Any:
        """Return a tensor without the framework's gradient record."""
        return tensor

    def place(self, tensor: Any) -> Any:
        """Return the device of a tensor, for ``placed``."""
        return None

    def placed(self, host: Any, place: Any) -> Any:
        """Return a host's values on the device of the compressor's result."""
        return host

    def unrecorded(self) -> AbstractContextManager[Any]:
        """Return a context in which the framework records no gradients."""
        return nullcontext()
