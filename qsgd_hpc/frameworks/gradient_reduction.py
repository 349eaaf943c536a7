"""The reduction of an optimizer's gradients, and its validation."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qsgd_hpc import env
from qsgd_hpc._core import Coding
from qsgd_hpc.compression import Lossy, from_environment
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.compressors import NoneCompressor
from qsgd_hpc.frameworks.reduction import Reduction, compressor_of, require_compression
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.ops import Adasum, Average, Group, Op, Operation, Sum
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set, require_member

__all__ = ["GradientReduction", "checked_reduction", "chosen_compression", "gradient_prefix"]


@dataclass(frozen=True)
class GradientReduction:
    """The reduction of every gradient of an optimizer."""

    op: Op = Average
    compression: Any = NoneCompressor
    predivide: float = 1.0
    """Divisor before the sum; the rest of an average's division by ``size()`` follows the sum."""
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set
    check_finite: bool = True
    """Whether NaN and Inf are errors; False if a loss scaler checks for them later."""

    @property
    def alone(self) -> bool:
        """Whether this rank has no other rank to reduce with."""
        return not self.process_set.included() or self.process_set.size() == 1

    @property
    def factors(self) -> tuple[float, float]:
        """The factors before and after the sum."""
        return 1.0 / self.predivide, self.predivide

    @property
    def compressor(self) -> Any:
        """The compressor around the reduction; none for codes, which the core applies."""
        return compressor_of(self.compression)

    def of_tensor(self) -> Reduction:
        """Return the reduction of a single gradient, whose name is used again in every step."""
        return Reduction(self.op, *self.factors, self.process_set, self.compression, lasting=True)

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
        prescale, postscale = self.factors
        return ops.operation(
            "allreduce",
            f"allreduce.{name}",
            self.process_set,
            op=self.op,
            prescale=prescale,
            postscale=postscale,
            coding=coding,
            lasting=True,
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

    Raises:
        UsageError: invalid arguments.
    """
    chosen = chosen_compression(compression, op)
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
    return GradientReduction(op, chosen, predivide, sparse_as_dense, process_set, check_finite)


def chosen_compression(compression: Any, op: Op = Average) -> Any:
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
    require_compression(compression)
    return compression


def gradient_prefix(process_set: ProcessSet) -> str:
    """Return the prefix of an optimizer's operation names, before the names of its parameters."""
    # A second optimizer of a model needs different names. Counted per set: all ranks of a set build
    # its optimizers in the same order, but only some ranks build those of other sets.
    which = process_set.process_set_id
    number = basics.next_number(f"optimizer.{which}")
    of_set = f"set{which}." if which else ""
    return f"gradient.{of_set}{number}." if number else f"gradient.{of_set}"
