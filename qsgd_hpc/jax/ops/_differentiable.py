"""The collectives as JAX can execute, compile and differentiate them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from qsgd_hpc._core import Coding
from qsgd_hpc.compression import Lossy
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.eager import (
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
)
from qsgd_hpc.frameworks.reduction import CURVED, Reduction, is_widened, op_for
from qsgd_hpc.jax.ops._arrays import ARRAYS
from qsgd_hpc.jax.ops._collective import TANGENT, Arrays, Collective, Shape, run
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.ops import Adasum, Average, Handle, Op, Product, Sum
from qsgd_hpc.runtime.process_sets import ProcessSet

__all__ = ["Allgather", "Allreduce", "Alltoall", "Broadcast", "Reducescatter"]


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


@dataclass(frozen=True)
class _Reducing(Collective):
    """A collective that reduces arrays."""

    op: Op
    prescale: float = 1.0
    postscale: float = 1.0

    def is_widened(self, dtype: Any) -> bool:
        """Return whether the sum could wrap, or the core has no arithmetic for the type."""
        return is_widened(np.dtype(dtype).name, op_for(self.op, np.dtype(dtype).name))

    def fields(self, index: int, shape: Shape, dtype: Any) -> dict[str, Any]:
        """Return the operation and its factors."""
        op = op_for(self.op, np.dtype(dtype).name).name
        return {"op": op, "prescale": self.prescale, "postscale": self.postscale}


@dataclass(frozen=True)
class Allreduce(_Reducing):
    """An allreduce of arrays over the ranks of a process set."""

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

    def fields(self, index: int, shape: Shape, dtype: Any) -> dict[str, Any]:
        """Return the operation, its factors and its coding."""
        coding = self._coding(index, shape, dtype)
        return {
            **super().fields(index, shape, dtype),
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
        sums = replace(self, **self.derived(TANGENT), op=Sum)
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
        gather = Allgather(**call.derived(".factors"), op=Sum)
        everyone = run(gather, [x[None] for x in inputs])
        return [jnp.concatenate([x[:mine], x[mine + 1 :]]).prod(0) for x in everyone]
    holds = [(x == y).astype(x.dtype) for x, y in zip(inputs, outputs, strict=True)]
    counts = run(Allreduce(**call.derived(".ties"), op=Sum), holds)
    return [held / count for held, count in zip(holds, counts, strict=True)]


@dataclass(frozen=True)
class Reducescatter(_Reducing):
    """A reduction of arrays of which each rank gets its part of the rows."""

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

    def picked(self, indices: Sequence[int]) -> Reducescatter:
        """Return this call for some of its arrays."""
        rows = tuple(self.total_rows[i] for i in indices)
        return replace(super().picked(indices), total_rows=rows)

    def derivative(self, inputs: Arrays, outputs: Arrays, tangents: Arrays) -> Arrays:
        """Reduce the tangents like the arrays; for nonlinear operations, their shares."""
        if self.op not in CURVED:
            return super().derivative(inputs, outputs, tangents)
        results = run(self._gather(self.derived(".results")), outputs)
        factors = slopes(self, self.op, inputs, results)
        changes = [t * factor for t, factor in zip(tangents, factors, strict=True)]
        names = self.derived(TANGENT)["names"]
        return [
            summed_shares(change, self._shares(rows), name, self.process_set)
            for change, rows, name in zip(changes, self.total_rows, names, strict=True)
        ]

    def _gather(self, named: dict[str, Any]) -> Allgather:
        return Allgather(**named, known_rows=tuple(map(self._shares, self.total_rows)))

    def transposed(self, cotangents: Arrays) -> Arrays:
        """Return all ranks' shares of the cotangent, times the factors of the reduction."""
        totals = run(self._gather(self.transposed_names()), cotangents)
        factor = self.prescale * self.postscale
        if self.op is Sum:
            factor *= len(ops.ranks_of(self.process_set))
        return [total * factor for total in totals]


@dataclass(frozen=True)
class Broadcast(Collective):
    """A broadcast of one rank's arrays to all ranks of a process set."""

    root_rank: int
    """A rank of the job."""

    kind: ClassVar[str] = "broadcast"

    @property
    def in_place(self) -> bool:
        """Whether results replace the arguments: the core uses one buffer for both."""
        return True

    def start_one(self, index: int, array: Any) -> Handle:
        """Start replacing a copy of an array."""
        name = self.names[index]
        return start_broadcast(ARRAYS, array, self.root_rank, name, self.process_set)

    def fields(self, index: int, shape: Shape, dtype: Any) -> dict[str, Any]:
        """Return the root rank."""
        return {"root": self.root_rank}

    def transposed(self, cotangents: Arrays) -> Arrays:
        """Return the mean of all ranks' cotangents on the root, else 0."""
        means = run(Allreduce(**self.transposed_names(), op=Average), cotangents)
        # Hide the condition from JAX and XLA: on ranks other than the root, they would remove the
        # unused means or reorder them, and the ranks' programs would differ.
        hidden: Any = jax.lax.optimization_barrier
        root = hidden(jnp.asarray(basics.rank() == self.root_rank))
        return [jnp.where(root, mean, jnp.zeros_like(mean)) for mean in means]
