"""``allreduce`` and ``reducescatter`` of arrays, in place or not, blocking or not, in groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from numpy.typing import NDArray

from qsgd_hpc.arrays._memory import adapter_of, view_of, writable_view_of
from qsgd_hpc.frameworks.eager import start_allreduces, start_reducescatters
from qsgd_hpc.frameworks.reduction import reduction_of
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Handle, Op
from qsgd_hpc.runtime.process_sets import ProcessSet

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Options", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "reducescatter", "reducescatter_async",
]  # fmt: skip

Array = NDArray[Any]


class Options(TypedDict, total=False):
    """Arguments of every reducing call, other than its arrays and its name."""

    average: bool | None
    """Deprecated: ``op=hvd.Average`` (True) or ``op=hvd.Sum`` (False)."""
    op: Op | None
    """Average (default), Sum, Min, Max, Product or Adasum. Integers average towards zero."""
    prescale_factor: float
    """Multiplies every rank's array before the sum."""
    postscale_factor: float
    """Multiplies the result."""
    process_set: ProcessSet
    """The participating ranks; default: all."""
    compression: Any
    """One of ``hvd.Compression``, or a custom class with ``compress`` and ``decompress``."""


def _start_allreduces(
    arrays: Sequence[Array], name: str | None, options: Options, **how: bool
) -> Handle:
    """Start reducing arrays in place, or into new ones; the result is their list."""
    reduction = reduction_of(name, **options)
    text = ops.label("allreduce", name, reduction.process_set)
    return start_allreduces(adapter_of(arrays), arrays, reduction, text, **how)


def _start_reducescatters(
    arrays: Sequence[Array], name: str | None, options: Options, **how: bool
) -> Handle:
    """Start reducing arrays; each rank gets its part of the rows."""
    reduction = reduction_of(name, **options)
    text = ops.label("reducescatter", name, reduction.process_set)
    return start_reducescatters(adapter_of(arrays), arrays, reduction, text, **how)


def _only(made: list[Any]) -> Any:
    return made[0]


def allreduce_async(array: Any, name: str | None = None, **options: Unpack[Options]) -> Handle:
    """Start an ``allreduce``; ``synchronize`` returns its result as a new array."""
    return _start_allreduces([view_of(array)], name, options).then(_only)


def allreduce_async_(array: Any, name: str | None = None, **options: Unpack[Options]) -> Handle:
    """Start an allreduce that replaces ``array``; do not access it before ``synchronize``."""
    view = writable_view_of(array, "allreduce_")
    return _start_allreduces([view], name, options, in_place=True).then(lambda _: array)


def allreduce(array: Any, name: str | None = None, **options: Unpack[Options]) -> Array:
    """Return the average (or ``op``) of every rank's ``array``; shapes must be equal.

    Args:
        array: any numeric type; unchanged.
        name: pairs the calls of the ranks; default: by order.
        options: see :class:`Options`.
    Raises:
        HorovodInternalError: the ranks' arrays do not match, or a rank died.
    """
    reduced: Array = ops.run_now(allreduce_async, array, name, **options)
    return reduced


def allreduce_(array: Any, name: str | None = None, **options: Unpack[Options]) -> Any:
    """Replace ``array`` by the average (or ``op``) over the ranks; see :func:`allreduce`."""
    return ops.run_now(allreduce_async_, array, name, **options)


def grouped_allreduce_async(
    arrays: Sequence[Any], name: str | None = None, **options: Unpack[Options]
) -> Handle:
    """Start a ``grouped_allreduce``; ``synchronize`` returns its results as new arrays."""
    return _start_allreduces([view_of(each) for each in arrays], name, options, grouped=True)


def grouped_allreduce_async_(
    arrays: Sequence[Any], name: str | None = None, **options: Unpack[Options]
) -> Handle:
    """Start a ``grouped_allreduce`` that replaces the arrays."""
    views = [writable_view_of(each, "grouped_allreduce_") for each in arrays]
    handle = _start_allreduces(views, name, options, in_place=True, grouped=True)
    return handle.then(lambda _: list(arrays))


def grouped_allreduce(
    arrays: Sequence[Any], name: str | None = None, **options: Unpack[Options]
) -> list[Array]:
    """Reduce several arrays, which complete or fail together; see :func:`allreduce`."""
    reduced: list[Array] = grouped_allreduce_async(arrays, name, **options).wait()
    return reduced


def grouped_allreduce_(
    arrays: Sequence[Any], name: str | None = None, **options: Unpack[Options]
) -> list[Any]:
    """Replace several arrays by their reductions; see :func:`grouped_allreduce`."""
    reduced: list[Any] = grouped_allreduce_async_(arrays, name, **options).wait()
    return reduced


def reducescatter_async(array: Any, name: str | None = None, **options: Unpack[Options]) -> Handle:
    """Start a ``reducescatter``; ``synchronize`` returns its result."""
    return _start_reducescatters([view_of(array)], name, options).then(_only)


def reducescatter(array: Any, name: str | None = None, **options: Unpack[Options]) -> Array:
    """Return this rank's rows of the average (or ``op``) of all ranks' arrays.

    The rows are split as evenly as possible; the first ranks get one more. The arguments are those
    of :func:`allreduce`.
    """
    share: Array = ops.run_now(reducescatter_async, array, name, **options)
    return share


def grouped_reducescatter_async(
    arrays: Sequence[Any], name: str | None = None, **options: Unpack[Options]
) -> Handle:
    """Start a ``grouped_reducescatter``; ``synchronize`` returns its results."""
    return _start_reducescatters([view_of(each) for each in arrays], name, options, grouped=True)


def grouped_reducescatter(
    arrays: Sequence[Any], name: str | None = None, **options: Unpack[Options]
) -> list[Array]:
    """Reduce and scatter several arrays, which complete or fail together."""
    shares: list[Array] = grouped_reducescatter_async(arrays, name, **options).wait()
    return shares
