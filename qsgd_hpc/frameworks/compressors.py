"""``hvd.Compression``: compressors of tensors, for all frameworks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from qsgd_hpc.compression import KINDS, Auto

__all__ = ["CastCompressor", "Choices", "Compressor", "NoneCompressor", "casting"]


class Compressor(Protocol):
    """A pair of functions around the allreduce; scripts may define their own.

    If a framework traces the call (``tf.function``, ``jax.jit``), they are traced, too.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to reduce, and the context for ``decompress``."""

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return the reduced tensor in its original type."""


class NoneCompressor:
    """The compressor that leaves tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return the tensor."""
        return tensor


class CastCompressor:
    """A compressor that sends floating-point tensors in another type; see :func:`casting`."""

    target: Any
    is_floating: Callable[[Any], bool]
    cast: Callable[[Any, Any], Any]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in the type to send, if it is floating-point."""
        sent = cls.cast(tensor, cls.target) if cls.is_floating(tensor) else tensor
        return sent, tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, context: Any) -> Any:
        """Return the tensor in its original type."""
        return cls.cast(tensor, context)


def casting(
    is_floating: Callable[[Any], bool], cast: Callable[[Any, Any], Any], **targets: Any
) -> list[type[CastCompressor]]:
    """Return a compressor for each type to send.

    Args:
        is_floating: returns whether a tensor has floating-point elements.
        cast: returns a tensor in a type.
        targets: the compressors' names, and the framework's types.
    """
    how = {"is_floating": staticmethod(is_floating), "cast": staticmethod(cast)}
    return [
        type(name, (CastCompressor,), {**how, "target": target}) for name, target in targets.items()
    ]


class _Named(type):
    """Metaclass whose classes have an attribute for every code."""

    def __getattr__(cls, name: str) -> Any:
        if name in KINDS:
            return KINDS[name]
        raise AttributeError(f"there is no Compression.{name}; choose one of {', '.join(dir(cls))}")

    def __dir__(cls) -> list[str]:
        own = [name for name in super().__dir__() if not name.startswith("_") and name != "mro"]
        return sorted({*own, *KINDS})


class Choices(metaclass=_Named):
    """The choices for ``compression=``: none, a code such as ``qsgd(bits=4)``, or ``auto()``.

    Each code is a class of :mod:`qsgd_hpc.compression`. A framework's own choices add fp16 and
    bf16.
    """

    none = NoneCompressor
    auto = Auto
