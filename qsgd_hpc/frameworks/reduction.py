"""Arguments of reducing collectives, and their validation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from qsgd_hpc._core import Coding
from qsgd_hpc.compression import Lossy
from qsgd_hpc.errors import HorovodInternalError, UsageError
from qsgd_hpc.frameworks.compressors import NoneCompressor
from qsgd_hpc.runtime.ops import Adasum, Average, Max, Min, Op, Product, Sum
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

__all__ = [
    "CURVED",
    "Reduction",
    "coding_for",
    "compressor_of",
    "is_widened",
    "op_for",
    "reduction_of",
    "require_compression",
    "require_values",
]


CURVED = (Min, Max, Product)
"""Operations whose derivative depends on the values."""


_FOREIGN = frozenset({"uint16", "uint32"})
_NARROW = frozenset({"uint8", "int8", "int16", "int32"})


@dataclass(frozen=True)
class Reduction:
    """The reduction of every tensor of a call."""

    op: Op
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set
    compression: Any = NoneCompressor
    lasting: bool = False
    """Whether the name is used again."""


def reduction_of(
    name: str | None,
    op: Op | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = NoneCompressor,
) -> Reduction:
    """Return the reduction of a call; a given name is assumed to be used again.

    Raises:
        UsageError: an argument that is not one, or a factor that is not finite.
    """
    if average is not None and op is not None:
        raise UsageError("pass op= or the deprecated average=, not both")
    if op is None:
        op = Sum if average is not None and not average else Average
    if not isinstance(op, Op):
        raise UsageError(f"op={op!r}: choose hvd.Average, Sum, Min, Max, Product or Adasum")
    factors = prescale_factor, postscale_factor
    for which, factor in zip(("prescale", "postscale"), factors, strict=True):
        if isinstance(factor, float) and not math.isfinite(factor):
            raise UsageError(f"{which}_factor={factor}: choose a finite number")
    require_compression(compression)
    return Reduction(op, *factors, process_set, compression, name is not None)


def require_compression(compression: Any) -> None:
    """Check the argument of a call or an optimizer.

    Raises:
        UsageError: it is not a compression.
    """
    if not isinstance(compression, Lossy) and not hasattr(compression, "compress"):
        raise UsageError(
            f"compression={compression!r}: choose one of hvd.Compression, such as "
            "hvd.Compression.qsgd(bits=4)"
        )


def compressor_of(compression: Any) -> Any:
    """Return the compressor around a reduction; none for codes, which the core applies."""
    return NoneCompressor if isinstance(compression, Lossy) else compression


def op_for(op: Op, dtype: str, *factors: Any) -> Op:
    """Return the reduction that computes ``op`` on elements of a type (numpy's name).

    It keeps booleans 0 or 1: Max for a sum (any), Min for a product (all).

    Raises:
        UsageError: the type has no such reduction, or booleans would be multiplied by a factor.
    """
    if dtype.startswith("complex") and op not in (Average, Sum):
        raise UsageError(f"complex elements with op={op!r}: choose hvd.Average or hvd.Sum")
    if dtype != "bool":
        return op
    if any(isinstance(factor, (int, float)) and factor != 1 for factor in factors):
        raise UsageError(
            "bool tensors cannot be multiplied by prescale_factor or postscale_factor; reduce a "
            "floating tensor"
        )
    if op is Average:
        raise UsageError(
            "bool tensors have no average; pass op=hvd.Sum (any rank), or a floating tensor"
        )
    return {Sum: Max, Product: Min}.get(op, op)


def is_widened(dtype: str, op: Op) -> bool:
    """Return whether elements are sent as int64.

    Averages of narrow integers are, so that their sum does not wrap before the division; so are
    unsigned types for which the core has no arithmetic, whose values int64 can hold.
    """
    return dtype in _FOREIGN or (op is Average and dtype in _NARROW)


def coding_for(reduction: Reduction) -> Coding | None:
    """Return the coding of the floating tensors of a call; None: not coded.

    Raises:
        UsageError: its operation cannot be coded.
    """
    if not isinstance(reduction.compression, Lossy):
        return None
    if reduction.op not in (Average, Sum):
        raise UsageError(
            f"compression={reduction.compression!r} with op={reduction.op!r}: sums and averages "
            "can be compressed, not others; use Compression.none"
        )
    return reduction.compression.coding(lasting=reduction.lasting)


def require_values(reduction: Reduction) -> None:
    """Check the arguments of a reducescatter, which sends values, not codes.

    Raises:
        HorovodInternalError: the operation is Adasum; Horovod documents this type of error.
        UsageError: the compression is a code.
    """
    if reduction.op is Adasum:
        raise HorovodInternalError("reducescatter has no op=hvd.Adasum; choose Sum or Average")
    if isinstance(reduction.compression, Lossy):
        raise UsageError(
            f"reducescatter with compression={reduction.compression!r}: it sends values, not "
            "codes; choose Compression.none, fp16 or bf16"
        )
