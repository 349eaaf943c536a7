"""Keras on JAX."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax.numpy as jnp

from qsgd_hpc._base.gradient_reduction import GradientReduction
from qsgd_hpc.jax.compression import Compression
from qsgd_hpc.jax.gradients import reduce_tree
from qsgd_hpc.jax.ops import allreduce
from qsgd_hpc.keras._backend import Reducer
from qsgd_hpc.ops import Min

__all__ = [
    "EAGER_VALUES",
    "Compression",
    "all_ranks_agree",
    "complete",
    "have_values",
    "outside_of_graphs",
    "reducer",
    "scaled",
]

# Keras takes the values out of its variables while it trains.
EAGER_VALUES = False
outside_of_graphs = nullcontext


def reducer(reduction: GradientReduction, groups: Any) -> Reducer:
    """Return what reduces the gradients of one optimizer within a compiled step."""
    named = groups if isinstance(groups, int) else [[v.path for v in group] for group in groups]

    def reduce(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        paths = [v.path for v in variables]
        names = (
            paths if len(set(paths)) == len(paths) else [f"{p}.{i}" for i, p in enumerate(paths)]
        )
        given = {n: g for n, g in zip(names, gradients, strict=True) if g is not None}
        reduced = reduce_tree(given, "gradient.", reduction, named)
        return [reduced.get(name) for name in names]

    return reduce


def complete(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return the gradients: what a traced step lacks, it lacks on every rank."""
    return list(gradients)


def all_ranks_agree(yes: Any, reduction: GradientReduction) -> Any:
    """Return whether a boolean array is true on every rank."""
    count = jnp.asarray(yes, jnp.int32)
    return allreduce(count, name="finite", op=Min, process_set=reduction.process_set) > 0


def scaled(gradient: Any, factor: float) -> Any:
    """Return a gradient times a factor."""
    return gradient * factor


def have_values(variables: Sequence[Any]) -> bool:
    """Tell whether variables have values: not while Keras trains."""
    return False
