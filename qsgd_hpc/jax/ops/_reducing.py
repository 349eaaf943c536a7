"""``allreduce`` and ``reducescatter`` in all their forms: now or later, one array or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from qsgd_hpc._base.compressors import NoneCompressor
from qsgd_hpc._base.reduction import (
    CURVED,
    Reduction,
    choose_op,
    coding_for,
    op_for,
    require_values,
)
from qsgd_hpc.compression import Lossy
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jax.compression import compressor_for
from qsgd_hpc.jax.ops._allreduce import Allreduce
from qsgd_hpc.jax.ops._collective import Arrays, call_names, is_traced, refuse_traced
from qsgd_hpc.jax.ops._primitive import run
from qsgd_hpc.jax.ops._reducescatter import Reducescatter
from qsgd_hpc.ops import Handle, Op
from qsgd_hpc.process_sets import ProcessSet, global_process_set

__all__ = [
    "allreduce",
    "allreduce_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


@dataclass(frozen=True)
class _Request:
    """What a caller asks for."""

    reduction: Reduction
    name: str | None
    grouped: bool

    def named(self, kind: str, arrays: Arrays) -> dict[str, Any]:
        """Return the fields of a call that all kinds of it have."""
        sets = self.reduction.process_set
        names = call_names(kind, self.name, sets, arrays, grouped=self.grouped)
        group = names[0].removesuffix(".0") if self.grouped and names else None
        return {
            "names": names,
            "process_set": sets,
            "group": group,
            "op": self.reduction.op,
            "prescale": self.reduction.prescale,
            "postscale": self.reduction.postscale,
        }

    def factors_apart(self, arrays: Arrays) -> tuple[_Request, Arrays, float]:
        """Return a request, arrays and the factor of its results.

        Where the derivative depends on the values, scaling them is left to JAX.
        """
        reduction = self.reduction
        factors = reduction.prescale, reduction.postscale
        if factors == (1.0, 1.0) or reduction.op not in CURVED or not is_traced(arrays):
            return self, arrays, 1.0
        plain = replace(self, reduction=replace(reduction, prescale=1.0, postscale=1.0))
        return plain, _times(arrays, reduction.prescale), reduction.postscale


def _times(arrays: Arrays, factor: float) -> list[Any]:
    return [(array * factor).astype(array.dtype) for array in arrays]


Make = Callable[[_Request, Arrays], Any]


def _request(
    op: Op | None,
    average: bool | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: Any,
    name: str | None,
    *,
    grouped: bool = False,
) -> _Request:
    chosen = choose_op(op, average)
    reduction = Reduction(chosen, prescale, postscale, process_set, compression, name is not None)
    return _Request(reduction, name, grouped)


def _allreduce(request: _Request, arrays: Arrays) -> Allreduce:
    coding_for(request.reduction)  # complains of what cannot be coded
    compression = request.reduction.compression
    return Allreduce(
        **request.named("allreduce", arrays),
        compression=compression if isinstance(compression, Lossy) else None,
        lasting=request.reduction.lasting or is_traced(arrays),
    )


def _reducescatter(request: _Request, arrays: Arrays) -> Reducescatter:
    require_values(request.reduction)
    if any(array.ndim == 0 for array in arrays):
        raise UsageError(
            "reducescatter cuts arrays along their first dimension, and a scalar has none; pass "
            "x.reshape(1)"
        )
    whole = tuple(array.shape[0] for array in arrays)
    return Reducescatter(**request.named("reducescatter", arrays), whole=whole)


def _compressed(request: _Request, tensors: Arrays) -> tuple[list[Any], Callable[[Arrays], Any]]:
    """Return the arrays that travel, and what makes the caller's of the reduced ones."""
    arrays = [jnp.asarray(tensor) for tensor in tensors]
    for array in arrays:
        op_for(request.reduction.op, array.dtype.name)
    kinds = [compressor_for(array.dtype, request.reduction.compression) for array in arrays]
    pairs = [kind.compress(array) for kind, array in zip(kinds, arrays, strict=True)]

    def restored(reduced: Arrays) -> list[Any]:
        contexts = [context for _, context in pairs]
        return [k.decompress(r, c) for k, r, c in zip(kinds, reduced, contexts, strict=True)]

    return [travelling for travelling, _ in pairs], restored


def _now(make: Make, request: _Request, tensors: Arrays) -> list[Any]:
    travelling, restored = _compressed(request, tensors)
    plain, scaled, factor = request.factors_apart(travelling)
    made: list[Any] = restored(run(make(plain, scaled), scaled))
    return made if factor == 1 else _times(made, factor)


def _later(make: Make, request: _Request, tensors: Arrays, function: str) -> Handle:
    refuse_traced(tensors, function)
    travelling, restored = _compressed(request, tensors)
    handle: Handle = make(request, travelling).start(travelling)
    return handle.then(restored)


def _first(made: list[jax.Array]) -> jax.Array:
    return made[0]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> jax.Array:
    """Return the average (or ``op``) of every rank's array; shapes must be equal.

    Works on concrete arrays and inside ``jit``, ``grad``, ``vmap``, ``scan`` and ``cond``. Its
    gradient is the same reduction of the ranks' output gradients, for Average and Sum.

    Args:
        tensor: any numeric dtype.
        average: the older spelling of ``op=hvd.Average`` (True) and ``op=hvd.Sum`` (False).
        name: pairs the calls of the ranks; by default their order does, inside ``jit`` that of
            tracing.
        compression: one of ``hvd.Compression``.
        op: Average (default), Sum, Min, Max, Product or Adasum. Integers average towards zero.
        prescale_factor: multiplies every rank's array before the sum.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part; by default all.
    Raises:
        HorovodInternalError: the ranks' arrays do not fit each other, or a rank died. From
            compiled programs JAX raises an error of its own with that text; see
            ``hvd.translated_errors``.
    """
    factors = prescale_factor, postscale_factor
    request = _request(op, average, *factors, process_set, compression, name)
    return _first(_now(_allreduce, request, [tensor]))


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an allreduce of a concrete array; ``synchronize`` returns its result."""
    factors = prescale_factor, postscale_factor
    request = _request(op, average, *factors, process_set, compression, name)
    return _later(_allreduce, request, [tensor], "allreduce").then(_first)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[jax.Array]:
    """Reduce several arrays, which complete or fail together; see :func:`allreduce`."""
    factors = prescale_factor, postscale_factor
    request = _request(op, average, *factors, process_set, compression, name, grouped=True)
    return _now(_allreduce, request, tensors)


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a ``grouped_allreduce`` of concrete arrays; ``synchronize`` returns its results."""
    factors = prescale_factor, postscale_factor
    request = _request(op, average, *factors, process_set, compression, name, grouped=True)
    return _later(_allreduce, request, tensors, "grouped_allreduce")


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    average: bool | None = None,
) -> jax.Array:
    """Return this rank's rows of the average (or ``op``) of all ranks' arrays.

    Its gradient is the ranks' output gradients, gathered, times the factors; for Sum also times
    the number of ranks.

    Args:
        tensor: at least one dimension; shapes must be equal. The rows are cut as evenly as
            possible; the first ranks get one more.
        name: pairs the calls of the ranks; by default their order does.
        compression: ``hvd.Compression.none``, ``fp16`` or ``bf16``, or one's own.
        op: Average (default), Sum, Min, Max or Product.
        process_set: the ranks that take part; by default all.
        prescale_factor: multiplies every rank's array before the sum.
        postscale_factor: multiplies the result.
        average: the older spelling of ``op=hvd.Average`` (True) and ``op=hvd.Sum`` (False).
    Raises:
        HorovodInternalError: the ranks' arrays do not fit each other, or a rank died.
    """
    factors = prescale_factor, postscale_factor
    request = _request(op, average, *factors, process_set, compression, name)
    return _first(_now(_reducescatter, request, [tensor]))


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    average: bool | None = None,
) -> Handle:
    """Start a ``reducescatter`` of a concrete array; ``synchronize`` returns its result."""
    factors = prescale_factor, postscale_factor
    request = _request(op, average, *factors, process_set, compression, name)
    return _later(_reducescatter, request, [tensor], "reducescatter").then(_first)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    average: bool | None = None,
) -> list[jax.Array]:
    """Reduce and share out several arrays, which complete or fail together."""
    factors = prescale_factor, postscale_factor
    request = _request(op, average, *factors, process_set, compression, name, grouped=True)
    return _now(_reducescatter, request, tensors)


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Any = NoneCompressor,
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    average: bool | None = None,
) -> Handle:
    """Start a ``grouped_reducescatter`` of concrete arrays; ``synchronize`` returns its results."""
    factors = prescale_factor, postscale_factor
    request = _request(op, average, *factors, process_set, compression, name, grouped=True)
    return _later(_reducescatter, request, tensors, "grouped_reducescatter")
