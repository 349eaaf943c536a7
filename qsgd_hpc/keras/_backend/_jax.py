"""Keras on JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qsgd_hpc.frameworks.reduction import GradientReduction
from qsgd_hpc.frameworks.shared_names import claim_residual
from qsgd_hpc.jax.compression import Compression
from qsgd_hpc.jax.elastic import run
from qsgd_hpc.jax.ops import allreduce
from qsgd_hpc.jax.optimizer import reduce_tree
from qsgd_hpc.keras._backend import Backend, Reducer, distinct_paths
from qsgd_hpc.runtime.ops import Min

__all__ = ["BACKEND"]


class _Jax(Backend):
    Compression = Compression
    elastic_run = staticmethod(run)
    eager_values = False  # during training, Keras keeps the values outside its variables

    def reducer(self, reduction: GradientReduction, groups: Any) -> Reducer:
        """Return a function that reduces the gradients of one optimizer within a compiled step."""
        named = groups if isinstance(groups, int) else [[v.path for v in group] for group in groups]

        def reduce(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
            names = distinct_paths(variables)
            for name, v in zip(names, variables, strict=True):
                coding = reduction.coding(name, v.shape, v.dtype)
                claim_residual(f"gradient.{name}", v, coding, reduction.process_set)
            given = {n: g for n, g in zip(names, gradients, strict=True) if g is not None}
            reduced = reduce_tree(given, "gradient.", reduction, named)
            return [reduced.get(name) for name in names]

        return reduce

    def if_updating(
        self, optimizer: Any, reduce: Callable[[Sequence[Any]], list[Any]], gradients: Sequence[Any]
    ) -> list[Any]:
        """Return the gradients, reduced unless Keras discards the result of this pass.

        What is discarded must not be reduced: its compression error would be added to a later one.
        """
        passes = optimizer.gradient_accumulation_steps
        if not passes:
            return reduce(gradients)
        # Keras's own condition, on a counter of all passes; Keras 3.3 and 3.4 have no other.
        counter = getattr(optimizer, "_iterations", None)
        count = optimizer.iterations if counter is None else counter
        due = (count.value + 1) % passes == 0
        if isinstance(due, jax.core.Tracer):
            reduced: list[Any] = jax.lax.cond(due, reduce, list, list(gradients))
            return reduced
        return reduce(gradients) if due else list(gradients)

    def all_ranks_agree(self, yes: Any, name: str, reduction: GradientReduction) -> Any:
        count = jnp.asarray(yes, jnp.int32)
        return allreduce(count, name=name, op=Min, process_set=reduction.process_set) > 0


BACKEND = _Jax()
