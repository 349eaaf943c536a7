"""What a call of a reducing collective asks for, and which of it can be had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qsgd_hpc._base.compressors import NoneCompressor
from qsgd_hpc._core import Coding
from qsgd_hpc.compression import Lossy
from qsgd_hpc.errors import HorovodInternalError, UsageError
from qsgd_hpc.ops import Adasum, Average, Max, Min, Op, Product, Sum
from qsgd_hpc.process_sets import ProcessSet, global_process_set

__all__ = [
    "CURVED",
    "Reduction",
    "choose_op",
    "coding_for",
    "op_for",
    "require_values",
]


CURVED = (Min, Max, Product)
"""Operations whose derivative depends on the values."""


@dataclass(frozen=True)
class Reduction:
    """What is done to every tensor of a call."""

    op: Op
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set
    compression: Any = NoneCompressor
    lasting: bool = False
    """Whether the name comes again."""


def choose_op(op: Op | None, average: bool | None) -> Op:
    """Resolve ``op`` and the older ``average`` flag."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise UsageError("pass op= or the older average=, not both")
    return Average if average else Sum


def op_for(op: Op, *, boolean: bool) -> Op:
    """Return the reduction that keeps booleans 0 or 1: any for a sum, all for a product."""
    if not boolean:
        return op
    if op is Average:
        raise UsageError(
            "bool tensors have no average; pass op=hvd.Sum (any rank), or a floating tensor"
        )
    return {Sum: Max, Product: Min}.get(op, op)


def coding_for(reduction: Reduction) -> Coding | None:
    """Return how to code the floating tensors of a call.

    Raises:
        UsageError: for its operation no code exists.
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
    """Check that a reducescatter can do what is asked: it sends values, and no codes.

    Raises:
        HorovodInternalError: it is Adasum, as Horovod documents it.
        UsageError: the compression codes.
    """
    if reduction.op is Adasum:
        raise HorovodInternalError("reducescatter has no op=hvd.Adasum; choose Sum or Average")
    if isinstance(reduction.compression, Lossy):
        raise UsageError(
            f"reducescatter with compression={reduction.compression!r}: it sends values, not "
            "codes; choose Compression.none, fp16 or bf16"
        )
