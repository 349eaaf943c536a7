"""``alltoall`` as a collective that JAX can execute, compile and differentiate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, ClassVar

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.eager import start_alltoall
from qsgd_hpc.jax.ops._arrays import ARRAYS
from qsgd_hpc.jax.ops._collective import Arrays, Collective, Shape, run
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Handle

__all__ = ["Alltoall"]


@dataclass(frozen=True)
class Alltoall(Collective):
    """An alltoall that sends ``sent[i]`` rows of one array to the i-th rank of the process set."""

    sent: Shape | None = None
    """Number of rows for each rank; None: the same number for each."""
    received: Shape | None = None
    """Number of rows from each rank; None if unknown."""

    kind: ClassVar[str] = "alltoall"
    has_rows: ClassVar[bool] = True

    def splits(self, shape: Shape) -> Shape:
        """Return the number of rows that this rank sends to each."""
        if self.sent is not None:
            return self.sent
        ranks = len(ops.ranks_of(self.process_set))
        if shape[0] % ranks:
            raise UsageError(
                f"alltoall of {shape[0]} rows over {ranks} ranks: pass splits=, or rows that "
                "divide evenly"
            )
        return (shape[0] // ranks,) * ranks

    def rows(self, index: int, shape: Shape) -> Shape:
        """Return the number of rows from each rank."""
        if self.received is not None:
            return self.received
        if self.sent is not None:
            raise UsageError(
                "alltoall with splits= inside a function that JAX traces: shapes must be known "
                "there; also pass the number of rows from each rank (received_splits=)"
            )
        return self.splits(shape)

    def result_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shape with the received rows."""
        return [(sum(self.rows(0, shape)), *shape[1:]) for shape in shapes]

    def start_one(self, index: int, array: Any) -> Handle:
        """Start exchanging rows."""
        return self.start_with_rows(array).then(itemgetter(0))

    def start_with_rows(self, array: Any) -> Handle:
        """Start exchanging rows; the result is the new array and the rows from each rank."""
        splits = self.splits(array.shape)
        return start_alltoall(ARRAYS, array, splits, self.names[0], self.process_set)

    def transposed(self, cotangents: Arrays) -> Arrays:
        """Send all rows back."""
        (cotangent,) = cotangents
        shape = (cotangent.shape[0],)
        sent = self.splits(shape)
        back = replace(self, **self.transposed_names(), sent=self.rows(0, shape), received=sent)
        return run(back, cotangents)
