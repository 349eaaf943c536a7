"""Starts reductions of arrays: in which type they travel, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from numpy.typing import NDArray

from qsgd_hpc import ops
from qsgd_hpc._base import eager
from qsgd_hpc._base.reduction import reduction_of
from qsgd_hpc.arrays._memory import ARRAYS
from qsgd_hpc.ops import Handle, Op
from qsgd_hpc.process_sets import ProcessSet

__all__ = ["Options", "start_allreduces", "start_reducescatters"]

Array = NDArray[Any]


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
    text = ops.label("allreduce", name, reduction.process_set)
    return eager.start_allreduces(
        ARRAYS, arrays, reduction, text, grouped=grouped, in_place=in_place
    )


def start_reducescatters(
    arrays: Sequence[Array], name: str | None, options: Options, *, grouped: bool = False
) -> Handle:
    """Start reducing arrays, of which each rank gets its share of the rows."""
    reduction = reduction_of(name, **options)
    text = ops.label("reducescatter", name, reduction.process_set)
    return eager.start_reducescatters(ARRAYS, arrays, reduction, text, grouped=grouped)
