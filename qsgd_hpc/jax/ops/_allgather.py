"""``allgather`` as a collective that JAX can execute, compile and differentiate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, ClassVar

from qsgd_hpc.frameworks.eager import start_allgather
from qsgd_hpc.jax.ops._alltoall import Alltoall
from qsgd_hpc.jax.ops._arrays import ARRAYS
from qsgd_hpc.jax.ops._collective import Arrays, Collective, Shape, run
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Average, Handle, Op
from qsgd_hpc.runtime.process_sets import ProcessSet

__all__ = ["Allgather", "summed_shares"]


def summed_shares(array: Any, rows: Shape, name: str, process_set: ProcessSet) -> Any:
    """Return the sum over the ranks of the rows that each has for this rank.

    A reducescatter built on alltoall, so that its gradient is the exact derivative, without a
    factor.
    """
    ranks, mine = len(rows), ops.position_in(process_set)
    call = Alltoall((name,), process_set, None, rows, (rows[mine],) * ranks)
    (parts,) = run(call, [array])
    return parts.reshape(ranks, rows[mine], *array.shape[1:]).sum(0)


@dataclass(frozen=True)
class Allgather(Collective):
    """An allgather of arrays with at least one dimension, in rank order."""

    op: Op = Average
    """Reduction of the ranks' cotangents: Average, as scripts of this API expect, or Sum, if it is
    part of the derivative of another operation."""
    known_rows: tuple[Shape, ...] = ()
    """Number of rows of every rank, for each array; default: this rank's number."""

    kind: ClassVar[str] = "allgather"
    has_rows: ClassVar[bool] = True

    def rows(self, index: int, shape: Shape) -> Shape:
        """Return the number of rows of each rank."""
        if self.known_rows:
            return self.known_rows[index]
        return (shape[0],) * len(ops.ranks_of(self.process_set))

    def result_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes with all ranks' rows."""
        return [(sum(self.rows(i, shape)), *shape[1:]) for i, shape in enumerate(shapes)]

    def start_one(self, index: int, array: Any) -> Handle:
        """Start gathering an array with any number of rows per rank."""
        name, group = self.names[index], self.core_group()
        handle = start_allgather(ARRAYS, array, name, self.process_set, group)
        return handle.then(itemgetter(0))

    def picked(self, indices: Sequence[int]) -> Allgather:
        """Return this call for some of its arrays."""
        rows = tuple(self.known_rows[i] for i in indices if self.known_rows)
        return replace(super().picked(indices), known_rows=rows)

    def transposed(self, cotangents: Arrays) -> Arrays:
        """Return the mean, or sum, over the ranks of the gradients of this rank's rows."""
        ranks = len(ops.ranks_of(self.process_set))
        names = self.transposed_names()["names"]
        shares = []
        for index, cotangent in enumerate(cotangents):
            rows = self.rows(index, (cotangent.shape[0] // ranks,))
            share = summed_shares(cotangent, rows, names[index], self.process_set)
            shares.append(share / ranks if self.op is Average else share)
        return shares
