"""In which type arrays are reduced, and by which operation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from qsgd_hpc._base.compressors import NoneCompressor
from qsgd_hpc._base.reduction import op_for as neutral_op_for
from qsgd_hpc.compression import FLOATING, Lossy
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jax.compression import Fp32Compressor
from qsgd_hpc.ops import Average, Max, Min, Op, Product, Sum

__all__ = ["CURVED", "compressor_for", "is_widened", "op_for"]

CURVED = (Min, Max, Product)
"""Operations whose derivative depends on the values."""

_NARROW = {"uint8", "int8", "int16", "int32"}
_FOREIGN = {"uint16", "uint32"}


def op_for(dtype: Any, op: Op) -> Op:
    """Return the reduction that an array of this type has.

    Raises:
        UsageError: the type has no such reduction.
    """
    kind = np.dtype(dtype).kind
    if kind == "c" and op not in (Average, Sum):
        raise UsageError(f"complex arrays have no op={op!r}; choose hvd.Sum or hvd.Average")
    return neutral_op_for(op, boolean=kind == "b")


def is_widened(dtype: Any, op: Op) -> bool:
    """Tell whether elements travel as int64, whose sum does not wrap before it is divided.

    The core has no arithmetic for some of them, either; int64 has room for their values.
    """
    name = np.dtype(dtype).name
    return name in _FOREIGN or (op is Average and name in _NARROW)


def compressor_for(dtype: Any, compression: Any) -> Any:
    """Return the pair of functions around the reduction of an array."""
    if jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).name not in FLOATING:
        return Fp32Compressor
    return NoneCompressor if isinstance(compression, Lossy) else compression
