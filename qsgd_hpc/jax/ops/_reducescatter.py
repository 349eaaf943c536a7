"""``reducescatter`` as a collective that JAX can execute, compile and differentiate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from qsgd_hpc.frameworks.eager import start_reducescatter
from qsgd_hpc.frameworks.reduction import CURVED, Reduction, is_widened, op_for
from qsgd_hpc.jax.ops._allgather import Allgather, summed_shares
from qsgd_hpc.jax.ops._allreduce import slopes
from qsgd_hpc.jax.ops._arrays import ARRAYS
from qsgd_hpc.jax.ops._collective import Arrays, Collective, Shape, run
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Handle, Op, Sum

__all__ = ["Reducescatter"]


@dataclass(frozen=True)
class Reducescatter(Collective):
    """A reduction of arrays of which each rank gets its part of the rows."""

    op: Op
    prescale: float = 1.0
    postscale: float = 1.0
    total_rows: tuple[int, ...] = ()
    """Number of rows of each array before it is scattered."""

    kind: ClassVar[str] = "reducescatter"
    has_rows: ClassVar[bool] = True

    def _shares(self, rows: int) -> Shape:
        """Return the number of rows of each rank, as even as possible; the first get one more."""
        ranks = len(ops.ranks_of(self.process_set))
        return tuple(rows // ranks + (i < rows % ranks) for i in range(ranks))

    def result_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes of this rank's shares."""
        mine = ops.position_in(self.process_set)
        return [(self._shares(shape[0])[mine], *shape[1:]) for shape in shapes]

    def start_one(self, index: int, array: Any) -> Handle:
        """Start reducing one array."""
        reduction = Reduction(self.op, self.prescale, self.postscale, self.process_set)
        return start_reducescatter(ARRAYS, array, reduction, self.names[index], self.core_group())

    def is_widened(self, dtype: Any) -> bool:
        """Return whether the sum could wrap, or the core has no arithmetic for the type."""
        return is_widened(np.dtype(dtype).name, op_for(self.op, np.dtype(dtype).name))

    def fields(self, index: int, shape: Shape, dtype: Any) -> dict[str, Any]:
        """Return the operation and its factors."""
        op = op_for(self.op, np.dtype(dtype).name).name
        return {"op": op, "prescale": self.prescale, "postscale": self.postscale}

    def picked(self, indices: Sequence[int]) -> Reducescatter:
        """Return this call for some of its arrays."""
        rows = tuple(self.total_rows[i] for i in indices)
        return replace(super().picked(indices), total_rows=rows)

    def derivative(self, inputs: Arrays, outputs: Arrays, tangents: Arrays) -> Arrays:
        """Reduce the tangents like the arrays; for nonlinear operations, their shares."""
        if self.op not in CURVED:
            return super().derivative(inputs, outputs, tangents)
        results = run(self._gather(self.renamed(".results")), outputs)
        factors = slopes(self, self.op, inputs, results)
        changes = [t * factor for t, factor in zip(tangents, factors, strict=True)]
        return [
            summed_shares(change, self._shares(rows), name, self.process_set)
            for change, rows, name in zip(
                changes, self.total_rows, self.renamed(".tangent").names, strict=True
            )
        ]

    def _gather(self, named: Collective) -> Allgather:
        rows = tuple(map(self._shares, self.total_rows))
        return Allgather(named.names, named.process_set, None, known_rows=rows)

    def transposed(self, cotangents: Arrays) -> Arrays:
        """Return all ranks' shares of the cotangent, times the factors of the reduction."""
        totals = run(self._gather(replace(self, **self.transposed_names())), cotangents)
        factor = self.prescale * self.postscale
        if self.op is Sum:
            factor *= len(ops.ranks_of(self.process_set))
        return [total * factor for total in totals]
