"""Start every rank from the same state."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from qsgd_hpc import arrays
from qsgd_hpc.errors import UsageError
from qsgd_hpc.jax.ops import broadcast_async
from qsgd_hpc.jax.ops._arrays import integers_of, kind_of, of_kind
from qsgd_hpc.jax.optimizer import path_names
from qsgd_hpc.runtime.objects import allgather_object, broadcast_object
from qsgd_hpc.runtime.ops import Handle
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(
    params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Return root_rank's parameters; JAX arrays cannot be changed in place.

    Args:
        params: a pytree; its arrays (JAX's, numpy's, random keys) and other leaves that can be
            pickled are replaced. Its structure is equal on every rank.
        root_rank: the rank of the job whose values are copied.
        process_set: the participating ranks; default: all.
    Raises:
        UsageError: inside ``jax.jit``.
    """
    return _broadcast_tree(params, "parameter", root_rank, process_set)


def broadcast_optimizer_state(
    state: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Return root_rank's state of an optax optimizer; see :func:`broadcast_parameters`.

    Raises:
        UsageError: the optimizer was passed instead of its state.
    """
    if hasattr(state, "init") and hasattr(state, "update"):
        raise UsageError(
            "broadcast_optimizer_state takes the state, not the optimizer: pass "
            "optimizer.init(params), and keep the result"
        )
    return _broadcast_tree(state, "optimizer.state", root_rank, process_set)


def _broadcast_tree(tree: Any, prefix: str, root_rank: int, process_set: ProcessSet) -> Any:
    leaves, structure = jax.tree_util.tree_flatten(tree)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise UsageError(
            "broadcast_parameters inside jax.jit: call it once before training, outside, or use "
            "hvd.broadcast"
        )
    names = path_names(tree)
    # Start all broadcasts before waiting for the first.
    handles = {
        i: _start(leaf, root_rank, f"{prefix}.{names[i]}", process_set)
        for i, leaf in enumerate(leaves)
        if _is_array(leaf)
    }
    received = {i: handle.wait() for i, handle in handles.items()}
    others = [leaf for i, leaf in enumerate(leaves) if i not in received]
    if others:
        others = broadcast_object(others, root_rank, f"{prefix}.others", process_set)
    rest = iter(others)
    mine = [received[i] if i in received else next(rest) for i in range(len(leaves))]
    return jax.tree_util.tree_unflatten(structure, mine)


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):  # the lengths of strings may differ between ranks
        return not leaf.dtype.hasobject and leaf.dtype.kind not in "SU"
    return isinstance(leaf, jax.Array)


def _start(leaf: Any, root_rank: int, name: str, process_set: ProcessSet) -> Handle:
    if isinstance(leaf, np.ndarray):  # JAX might convert 64 bits to 32
        return arrays.broadcast_async(leaf, root_rank, name, process_set)
    kind = kind_of(leaf)
    handle = broadcast_async(integers_of(leaf), root_rank, name, process_set)
    return handle.then(lambda received: of_kind(received, kind))
