"""The interface to Keras's backends; the backend is chosen when this package is imported."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import keras

from qsgd_hpc.elastic import run
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.reduction import GradientReduction

__all__ = ["BACKEND", "Backend", "Reducer", "distinct_paths"]

F = TypeVar("F", bound=Callable[..., Any])


Reducer = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""A function that returns gradients, given with their variables, reduced in the same order."""


class Backend(ABC):
    """One of Keras's backends."""

    Compression: Any
    elastic_run: Callable[..., Any] = staticmethod(run)
    eager_values = True
    """Whether variables can be read and set during training, outside of a traced step's graph."""

    @abstractmethod
    def reducer(self, reduction: GradientReduction, groups: Any) -> Reducer:
        """Return a function that reduces the gradients of one optimizer."""

    @abstractmethod
    def all_ranks_agree(self, yes: Any, name: str, reduction: GradientReduction) -> Any:
        """Return whether a boolean tensor is true on every rank, which ask under one name."""

    def complete(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients, with zeros for gradients that only this rank may lack.

        In a traced step, a missing gradient is missing on every rank, and stays None.
        """
        return list(gradients)

    def if_updating(
        self, optimizer: Any, reduce: Callable[[Sequence[Any]], list[Any]], gradients: Sequence[Any]
    ) -> list[Any]:
        """Return the gradients that Keras is about to clip, reduced if it updates variables.

        Passes that only accumulate gradients clip none, except on JAX.
        """
        return reduce(gradients)

    def uncompiled(self, function: F) -> F:
        """Return a function that torch.compile calls instead of compiling it.

        The other backends compile with XLA, which is refused on TensorFlow and works on JAX.
        """
        return function

    def scaled(self, gradient: Any, factor: float) -> Any:
        """Return a gradient, dense or sparse, times a factor."""
        return gradient * factor

    def outside_of_graphs(self) -> AbstractContextManager[Any]:
        """Return a context in which variables have values, even while a step is being traced."""
        return nullcontext()

    def have_values(self, variables: Sequence[Any]) -> bool:
        """Return whether variables have values that can be read now."""
        return self.eager_values


def distinct_paths(variables: Sequence[Any]) -> list[str]:
    """Return the variables' paths, with numbers if some are equal, as in nested models."""
    paths = [str(v.path) for v in variables]
    return paths if len(set(paths)) == len(paths) else [f"{p}.{i}" for i, p in enumerate(paths)]


def _choose() -> Backend:
    name = keras.backend.backend()
    if name not in ("tensorflow", "torch", "jax"):
        raise UsageError(
            f"qsgd_hpc.keras: Keras runs on the backend {name!r}, which cannot train on several "
            "ranks; set KERAS_BACKEND to tensorflow, torch or jax before keras is imported"
        )
    chosen: Backend = importlib.import_module(f"qsgd_hpc.keras._backend._{name}").BACKEND
    return chosen


BACKEND = _choose()
