"""``allreduce`` as a collective that JAX can execute, compile and differentiate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from qsgd_hpc._core import Coding
from qsgd_hpc.compression import Lossy
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.eager import start_allreduce
from qsgd_hpc.frameworks.reduction import CURVED, Reduction, is_widened, op_for
from qsgd_hpc.jax.ops._allgather import Allgather
from qsgd_hpc.jax.ops._arrays import ARRAYS
from qsgd_hpc.jax.ops._collective import Arrays, Collective, Shape, run
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Adasum, Handle, Op, Product, Sum

__all__ = ["Allreduce", "slopes"]


@dataclass(frozen=True)
class Allreduce(Collective):
    """An allreduce of arrays over the ranks of a process set."""

    op: Op
    prescale: float = 1.0
    postscale: float = 1.0
    compression: Lossy | None = None
    lasting: bool = False
    """Whether the names are used again."""
    check_finite: bool = False
    """Whether NaN or Inf in a result is an error, subject to QSGD_NONFINITE."""
    parameters: tuple[str, ...] = ()
    """Names of the parameters, for rules of compression."""
    overwrites: bool = False
    """Whether the arrays are not used afterwards, as for gradients."""

    kind: ClassVar[str] = "allreduce"

    @property
    def in_place(self) -> bool:
        """Whether a compiled program writes results to the memory of the arguments."""
        return self.overwrites

    def start_one(self, index: int, array: Any) -> Handle:
        """Start reducing one array."""
        reduction = Reduction(
            self.op, self.prescale, self.postscale, self.process_set, lasting=self.lasting
        )
        return start_allreduce(
            ARRAYS,
            array,
            reduction,
            self.names[index],
            self.core_group(),
            coding=self._coding(index, array.shape, array.dtype),
            check_finite=self.check_finite,
        )

    def _coding(self, index: int, shape: Shape, dtype: Any) -> Coding | None:
        if self.compression is None or not jnp.issubdtype(dtype, jnp.floating):
            return None
        if self.parameters:
            name = np.dtype(dtype).name
            return self.compression.coding_for_gradient(self.parameters[index], shape, name)
        return self.compression.coding(lasting=self.lasting)

    def is_widened(self, dtype: Any) -> bool:
        """Return whether the sum could wrap, or the core has no arithmetic for the type."""
        return is_widened(np.dtype(dtype).name, op_for(self.op, np.dtype(dtype).name))

    def fields(self, index: int, shape: Shape, dtype: Any) -> dict[str, Any]:
        """Return the operation, its factors and its coding."""
        coding = self._coding(index, shape, dtype)
        return {
            "op": op_for(self.op, np.dtype(dtype).name).name,
            "prescale": self.prescale,
            "postscale": self.postscale,
            "coding": coding,
            "lasting": self.lasting,
            "check_finite": self.check_finite or coding is not None,
        }

    def for_batches(self) -> Allreduce:
        """Return the call for arrays with one more dimension."""
        if self.op is Adasum:
            raise UsageError(
                "Adasum under jax.vmap: it combines whole arrays, not the examples of a batch; "
                "call it outside, or reduce by a sum"
            )
        return self

    def picked(self, indices: Sequence[int]) -> Allreduce:
        """Return this call for some of its arrays."""
        chosen = super().picked(indices)
        return replace(
            chosen, parameters=tuple(self.parameters[i] for i in indices if self.parameters)
        )

    def derivative(self, inputs: Arrays, outputs: Arrays, tangents: Arrays) -> Arrays:
        """Reduce the tangents like the arrays; for nonlinear operations, their shares."""
        if self.op is Adasum:
            raise UsageError(
                "Adasum has no gradient; pass jax.lax.stop_gradient(x), or reduce by a sum"
            )
        if self.op not in CURVED:
            return super().derivative(inputs, outputs, tangents)
        factors = slopes(self, self.op, inputs, outputs)
        sums = replace(self.renamed(".tangent"), op=Sum)
        return run(sums, [t * factor for t, factor in zip(tangents, factors, strict=True)])

    def transposed(self, cotangents: Arrays) -> Arrays:
        """Reduce the cotangents like the arrays."""
        return run(replace(self, **self.transposed_names()), cotangents)


def slopes(call: Collective, op: Op, inputs: Arrays, outputs: Arrays) -> list[Any]:
    """Return the derivative of a nonlinear operation's results by this rank's arrays.

    Ranks with equal extrema share the derivative, as in ``jax.numpy.max``.
    """
    if op is Product:
        mine = ops.position_in(call.process_set)
        gather = Allgather(**_named(call, ".factors"), op=Sum)
        everyone = run(gather, [x[None] for x in inputs])
        return [jnp.concatenate([x[:mine], x[mine + 1 :]]).prod(0) for x in everyone]
    holds = [(x == y).astype(x.dtype) for x, y in zip(inputs, outputs, strict=True)]
    counts = run(Allreduce(**_named(call, ".ties"), op=Sum), holds)
    return [held / count for held, count in zip(holds, counts, strict=True)]


def _named(call: Collective, suffix: str) -> dict[str, Any]:
    return {"names": call.renamed(suffix).names, "process_set": call.process_set, "group": None}
