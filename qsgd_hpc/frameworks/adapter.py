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
    """The way of one framework's tensors to the core and back.

    A *host* is a tensor that the core can read: contiguous, in memory of the CPU. Tensors that lie
    elsewhere are copied there; types are named as numpy names them.
    """

    word = "tensor"
    """The framework's word for a tensor."""
    conversion = "to()"
    """The call that gives one another type."""
    reduces_complex = False
    """Whether complex elements can be added, each as two floats."""

    @abstractmethod
    def on_host(self, tensor: Any) -> Any:
        """Return a tensor's values as a host, which is its own memory where that will do."""

    @abstractmethod
    def shares(self, host: Any, tensor: Any) -> bool:
        """Tell whether a host is somebody else's memory, that of ``tensor``."""

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
        """Return where a host begins."""

    @abstractmethod
    def cast(self, host: Any, dtype: str) -> Any:
        """Return a host's values in another type."""

    @abstractmethod
    def new_like(self, host: Any) -> Any:
        """Return a host for a result of the same shape and type."""

    @abstractmethod
    def copied(self, host: Any) -> Any:
        """Return a host of its own with the same values."""

    @abstractmethod
    def taken(self, received: Received, like: Any) -> Any:
        """Return what the core has made as a host, in the type of ``like``; it keeps the memory."""

    @abstractmethod
    def delivered(self, result: Any, like: Any, into: Any = None) -> Any:
        """Return a result in ``into``, or with the type of ``like`` and where that is."""

    def bare(self, tensor: Any) -> Any:
        """Return a tensor without what the framework records of it."""
        return tensor

    def place(self, tensor: Any) -> Any:
        """Return where a tensor is, for ``placed``."""
        return None

    def placed(self, host: Any, place: Any) -> Any:
        """Return a host's values where a compressor left what it made of them."""
        return host

    def unrecorded(self) -> AbstractContextManager[Any]:
        """Return a context in which the framework records no gradients."""
        return nullcontext()
