"""``hvd.elastic`` for JAX; see :mod:`qsgd_hpc.elastic` for its use in batch jobs.

::

    state = hvd.elastic.JaxState(params=params, opt_state=opt_state, epoch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            for batch in batches:
                state.params, state.opt_state = step(state.params, state.opt_state, batch)
            state.commit()

    train(state)
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax

import qsgd_hpc.elastic as neutral
from qsgd_hpc.elastic import HostsUpdatedInterrupt, State
from qsgd_hpc.frameworks.parts import Part
from qsgd_hpc.frameworks.sampler import ElasticShares
from qsgd_hpc.jax.errors import translated_errors

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "JaxState", "run"]

ElasticSampler = ElasticShares


class _TreePart(Part):
    """A pytree of arrays, which are immutable except for donation."""

    def capture(self) -> Any:
        """Copy the values to host memory, which later programs cannot reuse (donation)."""
        return jax.device_get(self.value)

    def put_back(self, captured: Any) -> None:
        """Replace the values."""
        self.value = captured


class JaxState(State):
    """Pytrees (parameters, the state of an optimizer, random keys...) and plain values.

    Args:
        attributes: each becomes an attribute; set it to new values in every step.
    """

    def _part(self, value: Any) -> Part:
        leaves = jax.tree_util.tree_leaves(value)
        arrays = any(isinstance(leaf, jax.Array) for leaf in leaves)
        return _TreePart(value) if arrays else super()._part(value)


def run(
    func: Callable[..., Any] | None = None, *, checkpoint: str | os.PathLike[str] | None = None
) -> Any:
    """Decorate a function whose first argument is a state, so that it survives failures.

    Like :func:`qsgd_hpc.elastic.run`; it also handles errors of collectives inside compiled
    programs.
    """
    if func is None:
        return functools.partial(run, checkpoint=checkpoint)

    @functools.wraps(func)
    def translated(*args: Any, **kwargs: Any) -> Any:
        with translated_errors():
            return func(*args, **kwargs)

    return neutral.run(translated, checkpoint=checkpoint)
