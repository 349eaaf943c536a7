"""``hvd.elastic`` for JAX; see :mod:`qsgd_hpc.elastic` for its use in batch jobs.

::

    state = hvd.elastic.JaxState(params=params, opt_state=opt_state, epoch=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < epochs:
            for batch in batches:
                state.params, state.opt_state = step(state.params, state.opt_state, batch)
            state.epoch += 1
            state.commit()

    train(state)
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import qsgd_hpc.elastic as neutral
from qsgd_hpc.elastic import HostsUpdatedInterrupt, State
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.parts import ElasticShares, Part, ValuePart
from qsgd_hpc.jax.job import translated_errors
from qsgd_hpc.jax.ops._arrays import integers_of, kind_of, of_kind, with_int64

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "JaxState", "run"]

ElasticSampler = ElasticShares


@dataclass(frozen=True)
class _Captured:
    """A JAX array in host memory, which later programs cannot reuse (donation)."""

    values: Any
    """numpy array."""
    kind: Any
    """The generator of random keys; None for other arrays."""

    def restored(self) -> jax.Array:
        with with_int64():
            array = jnp.array(self.values, copy=True)
        restored: jax.Array = of_kind(array, self.kind)
        return restored


class _CapturedTree:
    """The leaves of a pytree, and the pytree with their numbers in place of them.

    The structure may hold what cannot be pickled: flax's TrainState has the functions of the model
    and of the optimizer. Pickled without it, the leaves are put back into the tree that is there.
    """

    def __init__(self, leaves: list[Any], structure: Any) -> None:
        self.leaves = leaves
        self.numbers = jax.tree_util.tree_unflatten(structure, range(len(leaves)))

    def __getstate__(self) -> dict[str, Any]:
        try:
            pickle.dumps(self.numbers)
        except Exception:  # objects run code of their own
            return {"leaves": self.leaves, "numbers": None}
        return self.__dict__

    def restored(self, present: Any) -> Any:
        """Return the tree; ``present``: the current one, whose structure may have to be used."""
        structure = jax.tree_util.tree_structure(present if self.numbers is None else self.numbers)
        if structure.num_leaves != len(self.leaves):
            raise UsageError(
                f"{len(self.leaves)} leaves of a pytree were committed, but it has "
                f"{structure.num_leaves} now: create it in the same form before elastic.run "
                "resumes it"
            )
        leaves = [
            leaf.restored() if isinstance(leaf, _Captured) else copy.deepcopy(leaf)
            for leaf in self.leaves
        ]
        return jax.tree_util.tree_unflatten(structure, leaves)

    def difference(self, present: Any) -> str:
        """Name the first array whose shape differs from ``present``'s; empty if none does.

        A tree without arrays is one that the script has not made yet.
        """
        present = _by_path(present)
        here = {
            path: integers_of(leaf).shape
            for path, leaf in present.items()
            if isinstance(leaf, jax.Array)
        }
        paths = present if self.numbers is None else _by_path(self.numbers)
        there = {
            path: leaf.values.shape
            for path, leaf in zip(paths, self.leaves, strict=False)
            if isinstance(leaf, _Captured)
        }
        for path in {**here, **there} if here else {}:
            if here.get(path) != there.get(path):
                stored, made = (of.get(path, "no array") for of in (there, here))
                return f"{path} is {stored} in the file, {made} in the script"
        return ""


def _by_path(tree: Any) -> dict[str, Any]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in paths}


class _TreePart(ValuePart):
    """A pytree of JAX arrays and other leaves, or a plain value."""

    def capture(self) -> Any:
        """Return a copy, with the arrays in host memory."""
        leaves, structure = jax.tree_util.tree_flatten(self.value)
        arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
        if not arrays:
            return super().capture()
        host = jax.device_get({i: integers_of(array) for i, array in arrays.items()})
        captured = [
            _Captured(host[i], kind_of(leaf)) if i in host else copy.deepcopy(leaf)
            for i, leaf in enumerate(leaves)
        ]
        return _CapturedTree(captured, structure)

    def put_back(self, captured: Any) -> None:
        """Replace the value; its arrays are on the default device."""
        if isinstance(captured, _CapturedTree):
            self.value = captured.restored(self.value)
        else:
            super().put_back(captured)

    def difference(self, captured: Any) -> str:
        """Name the first array of another shape, which JAX would use without an error."""
        return captured.difference(self.value) if isinstance(captured, _CapturedTree) else ""


class JaxState(State):
    """Pytrees (parameters, the state of an optimizer, random keys...) and plain values.

    Args:
        attributes: each becomes an attribute; set it to new values in every step.
    """

    def _part(self, value: Any) -> Part:
        part = super()._part(value)
        return _TreePart(value) if type(part) is ValuePart else part


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
