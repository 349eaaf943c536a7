"""``hvd.Compression``: the choices of what travels instead of a tensor, for every framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from qsgd_hpc.compression import KINDS

__all__ = ["CastCompressor", "Choices", "Compressor", "NoneCompressor"]


class Compressor(Protocol):
    """A pair of functions around the allreduce; scripts may bring their own.

    Where a framework traces the call (``tf.function``, ``jax.jit``) it traces them, too.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what is reduced, and what ``decompress`` needs to know."""

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return the reduced tensor in its original type."""


class NoneCompressor:
    """Sends a tensor as it is."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return the tensor."""
        return tensor


class CastCompressor(ABC):
    """Sends floating tensors in another type."""

    target: Any
    """That type, as the framework calls it."""

    @staticmethod
    @abstractmethod
    def is_floating(tensor: Any) -> bool:
        """Tell whether the tensor has floating elements."""

    @staticmethod
    @abstractmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return the tensor in that type."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in the type that travels, if it is floating."""
        sent = cls.cast(tensor, cls.target) if cls.is_floating(tensor) else tensor
        return sent, tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, context: Any) -> Any:
        """Return the tensor in the type that it had."""
        return cls.cast(tensor, context)


class _Named(type):
    """Gives a class an attribute for every code, by its name."""

    def __getattr__(cls, name: str) -> Any:
        if name in KINDS:
            return KINDS[name]
        raise AttributeError(f"there is no Compression.{name}; choose one of {', '.join(dir(cls))}")

    def __dir__(cls) -> list[str]:
        own = [name for name in super().__dir__() if not name.startswith("_") and name != "mro"]
        return sorted({*own, *KINDS})


class Choices(metaclass=_Named):
    """The choices for ``compression=``: ``qsgd(bits=4)`` and its kin, or none.

    Each code is a class of :mod:`qsgd_hpc.compression`. A framework's own choices add fp16 and
    bf16.
    """

    none = NoneCompressor
