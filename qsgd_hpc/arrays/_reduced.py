"""Starts reductions of arrays: in which type they travel, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from qsgd_hpc import ops
from qsgd_hpc._base.compressors import NoneCompressor
from qsgd_hpc._base.reduction import (
    Reduction,
    choose_op,
    coding_for,
    op_for,
    require_values,
)
from qsgd_hpc.arrays._memory import array_from, as_rows, buffer_of, is_floating
from qsgd_hpc.compression import Lossy
from qsgd_hpc.ops import Average, Handle, Op
from qsgd_hpc.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from qsgd_hpc._core import Coding

__all__ = ["Options", "start_allreduces", "start_reducescatters"]

Array = NDArray[Any]

# The core has no arithmetic for these; int64 has room for their values.
_FOREIGN = frozenset({"uint16", "uint32"})
_NARROW = frozenset({"uint8", "int8", "int16", "int32"})


class Options(TypedDict, total=False):
    """What every reducing call takes beside its arrays and its name."""

    average: bool | None
    """The older spelling of ``op=hvd.Average`` (True) and ``op=hvd.Sum`` (False)."""
    op: Op | None
    """Average (default), Sum, Min, Max, Product or Adasum. Integers average towards zero."""
    prescale_factor: float
    """Multiplies every rank's array before the sum."""
    postscale_factor: float
    """Multiplies the result."""
    process_set: ProcessSet
    """The ranks that take part; by default all."""
    compression: Any
    """One of ``hvd.Compression``, or a class of one's own with ``compress`` and ``decompress``."""


def reduction_of(
    name: str | None,
    *,
    average: bool | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = NoneCompressor,
) -> Reduction:
    """Return what a call with these options asks for."""
    factors = prescale_factor, postscale_factor
    return Reduction(choose_op(op, average), *factors, process_set, compression, name is not None)


class _Widened:
    """Carries integers as int64, whose sum does not wrap before it is divided."""

    @staticmethod
    def compress(array: Array) -> tuple[Array, Any]:
        return array.astype(np.int64), array.dtype

    @staticmethod
    def decompress(array: Array, context: Any) -> Array:
        return array.astype(context)


@dataclass(frozen=True)
class _Prepared:
    """One array, ready to be handed to the core: what can be wrong with it is known by then."""

    array: Array
    travelling: Array
    compressor: Any
    context: Any
    op: Op
    coding: Coding | None

    @property
    def spare(self) -> bool:
        """Whether what travels is nobody else's memory."""
        return not np.may_share_memory(self.travelling, self.array)

    def back(self, reduced: Array) -> Array:
        """Return a result in the type that went in."""
        result = np.asarray(self.compressor.decompress(reduced, self.context))
        return result.astype(self.array.dtype, copy=False)


def _prepare(array: Array, reduction: Reduction, coding: Coding | None) -> _Prepared:
    op = op_for(reduction.op, boolean=array.dtype == np.bool_)
    compressor = (
        NoneCompressor if isinstance(reduction.compression, Lossy) else reduction.compression
    )
    if str(array.dtype) in _FOREIGN or (op is Average and str(array.dtype) in _NARROW):
        compressor = _Widened
    compressed, context = compressor.compress(array)
    travelling = np.asarray(compressed, order="C")
    code = coding if is_floating(array.dtype) else None
    return _Prepared(array, travelling, compressor, context, op, code)


def start_allreduces(
    arrays: Sequence[Array],
    name: str | None,
    options: Options,
    *,
    in_place: bool = False,
    grouped: bool = False,
) -> Handle:
    """Start reducing arrays in place, or into new ones; the result is their list."""
    reduction = reduction_of(name, **options)
    coding = coding_for(reduction)
    prepared = [_prepare(array, reduction, coding) for array in arrays]
    text = ops.label("allreduce", name, reduction.process_set)
    group = ops.Group(text, len(prepared)) if grouped else None
    names = ops.member_names(text, len(prepared)) if grouped else [text]
    return Handle.together(
        [
            _start_allreduce(each, reduction, one, group, in_place=in_place)
            for each, one in zip(prepared, names, strict=True)
        ]
    )


def _start_allreduce(
    each: _Prepared, reduction: Reduction, name: str, group: ops.Group | None, *, in_place: bool
) -> Handle:
    own = each.spare or (in_place and each.travelling is each.array)
    reduced = each.travelling if own else np.empty_like(each.travelling)

    def result() -> Array:
        back = each.back(reduced)
        if not in_place:
            return back
        if back is not each.array:
            each.array[...] = back
        return each.array

    return ops.allreduce(
        buffer_of(each.travelling),
        buffer_of(reduced),
        name=name,
        op=each.op,
        prescale=reduction.prescale,
        postscale=reduction.postscale,
        coding=each.coding,
        check_finite=each.coding is not None,
        lasting=reduction.lasting,
        process_set=reduction.process_set,
        group=group,
        result=result,
    )


def start_reducescatters(
    arrays: Sequence[Array], name: str | None, options: Options, *, grouped: bool = False
) -> Handle:
    """Start reducing arrays, of which each rank gets its share of the rows."""
    reduction = reduction_of(name, **options)
    require_values(reduction)
    prepared = [_prepare(as_rows(array, "reducescatter"), reduction, None) for array in arrays]
    text = ops.label("reducescatter", name, reduction.process_set)
    group = ops.Group(text, len(prepared)) if grouped else None
    names = ops.member_names(text, len(prepared)) if grouped else [text]
    return Handle.together(
        [
            _start_reducescatter(each, reduction, one, group)
            for each, one in zip(prepared, names, strict=True)
        ]
    )


def _start_reducescatter(
    each: _Prepared, reduction: Reduction, name: str, group: ops.Group | None
) -> Handle:
    return ops.reducescatter(
        buffer_of(each.travelling),
        name=name,
        op=each.op,
        prescale=reduction.prescale,
        postscale=reduction.postscale,
        process_set=reduction.process_set,
        group=group,
        result=lambda received: each.back(array_from(received, each.travelling)),
    )
