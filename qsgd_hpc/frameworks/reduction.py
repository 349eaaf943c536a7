"""Arguments of reductions, and their validation: of calls, and of an optimizer's gradients."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qsgd_hpc import env
from qsgd_hpc._core import Coding
from qsgd_hpc.compression import Lossy, from_environment
from qsgd_hpc.errors import HorovodInternalError, UsageError
from qsgd_hpc.frameworks.compressors import NoneCompressor
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.ops import Adasum, Average, Group, Max, Min, Op, Operation, Product, Sum
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set, require_member

__all__ = [
    "CURVED", "GradientReduction", "Reduction", "checked_reduction", "coding_for", "compressor_of",
    "gradient_prefix", "is_widened", "op_for", "reduction_of", "require_values",
]  # fmt: skip


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
    _require_compression(compression)
    return Reduction(op, *factors, process_set, compression, name is not None)


def _require_compression(compression: Any) -> None:
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


@dataclass(frozen=True)
class GradientReduction(Reduction):
    """The reduction of every gradient of an optimizer."""

    lasting: bool = True
    sparse_as_dense: bool = False
    check_finite: bool = True
    """Whether NaN and Inf are errors; False if a loss scaler checks for them later."""

    @property
    def alone(self) -> bool:
        """Whether this rank has no other rank to reduce with.

        False if the set is not registered (any more), so that the reduction raises an error.
        """
        return self.process_set.included() is False or self.process_set.size() == 1

    def operation(
        self, name: str, coding: Coding | None, group: Group | None, **tensor: Any
    ) -> Operation:
        """Return the allreduce of a gradient.

        Args:
            name: equal on every rank.
            coding: see :meth:`coding`.
            group: gradients that are reduced together.
            tensor: shape and dtype of the gradient, unless they are passed when it starts.
        """
        return ops.operation(
            "allreduce",
            f"allreduce.{name}",
            self.process_set,
            op=self.op,
            prescale=self.prescale,
            postscale=self.postscale,
            coding=coding,
            lasting=self.lasting,
            check_finite=self.check_finite,
            group=group,
            **tensor,
        )

    def coding(self, parameter: str, shape: Sequence[int], dtype: str) -> Coding | None:
        """Return the coding of a gradient by the core; None: not coded.

        Args:
            parameter: the parameter's name, for rules of compression.
            shape: of the gradient.
            dtype: of the gradient, numpy's name.
        """
        if not isinstance(self.compression, Lossy):
            return None
        return self.compression.coding_for_gradient(parameter, shape, dtype)


def checked_reduction(
    op: Op = Average,
    compression: Any = None,
    predivide: float = 1.0,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    check_finite: bool = True,
    caller: str = "DistributedOptimizer",
) -> GradientReduction:
    """Return the reduction that a script requests; QSGD_BITS applies if compression is None.

    ``predivide`` splits the division of an average: gradients are divided by it before the sum, and
    by the rest of ``size()`` after it.

    Raises:
        UsageError: invalid arguments.
    """
    chosen = _chosen_compression(compression, op)
    if op not in (Average, Sum, Adasum):
        raise UsageError(f"{caller}(op={op!r}): choose hvd.Average, hvd.Sum or hvd.Adasum")
    if op is Adasum and isinstance(chosen, Lossy):
        raise UsageError(
            "op=hvd.Adasum combines exact steps: pass compression=hvd.Compression.none (or "
            "fp16, bf16), or op=hvd.Average to compress gradients"
        )
    if predivide != 1.0 and op is not Average:
        raise UsageError(
            f"gradient_predivide_factor={predivide} splits an average; it needs op=hvd.Average"
        )
    if not predivide > 0:
        raise UsageError(f"gradient_predivide_factor={predivide}: choose more than 0")
    if not isinstance(process_set, ProcessSet) or process_set.included() is None:
        require_member(process_set)
    return GradientReduction(
        op,
        1.0 / predivide,
        predivide,
        process_set,
        chosen,
        sparse_as_dense=sparse_as_dense,
        check_finite=check_finite,
    )


def _chosen_compression(compression: Any, op: Op = Average) -> Any:
    """Return the compression of gradients: the script's, else that of QSGD_BITS and QSGD_SCHEME.

    Many Horovod scripts pass ``compression=hvd.Compression.none`` explicitly because it is
    Horovod's default. Therefore the environment overrides it if `import horovod` imports this
    package.

    Args:
        compression: the script's argument; None selects the environment's.
        op: the reduction; Adasum supports no codes.
    Raises:
        UsageError: it is not a compression.
    """
    if compression is NoneCompressor and op is not Adasum and (requested := from_environment()):
        if "horovod" in sys.modules:
            return requested
        if basics.rank() == 0:
            names = ("QSGD_BITS", "QSGD_SCHEME")
            settings = [f"{name}={env.get(name)}" for name in names if env.is_set(name)]
            warnings.warn(
                "gradients are sent uncompressed: compression=Compression.none in the script "
                f"overrides {' and '.join(settings)} of the command line or the environment; "
                "remove the argument to use them",
                stacklevel=4,
            )
    if compression is None:
        compression = from_environment() or NoneCompressor
    _require_compression(compression)
    return compression


def gradient_prefix(process_set: ProcessSet) -> str:
    """Return the prefix of an optimizer's operation names, before the names of its parameters."""
    # A second optimizer of a model needs different names. Counted per set: all ranks of a set build
    # its optimizers in the same order, but only some ranks build those of other sets.
    which = process_set.process_set_id
    number = basics.next_number(f"optimizer.{which}")
    of_set = f"set{which}." if which else ""
    return f"gradient.{of_set}{number}." if number else f"gradient.{of_set}"
