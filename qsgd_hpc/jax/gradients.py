"""Reduction of the gradients of a pytree over the ranks, in few calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qsgd_hpc.compression import Lossy
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.grouping import batches, partition
from qsgd_hpc.frameworks.reduction import GradientReduction, checked_reduction
from qsgd_hpc.frameworks.step_mark import mark_name, marks_steps, smallest
from qsgd_hpc.jax.compression import compressed
from qsgd_hpc.jax.ops import allreduce
from qsgd_hpc.jax.ops._collective import blocks_programs, is_traced, run
from qsgd_hpc.jax.ops._differentiable import Allreduce
from qsgd_hpc.runtime.ops import Adasum, Average, Op, Sum
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

__all__ = ["Groups", "allreduce_gradients", "path_names", "reduce_tree"]

Groups = int | Sequence[Sequence[str]]


def path_names(tree: Any) -> list[str]:
    """Return a name for each leaf from its keys, such as ``params.Dense_0.kernel``."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [".".join(map(_key, path)) or "0" for path, _ in paths]
    if len(set(names)) < len(names):  # keys that contain dots
        names = [f"{name}.{i}" for i, name in enumerate(names)]
    return names


def _key(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):  # attributes of jax.tree_util's kinds of keys
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _calls(
    leaves: Sequence[Any], names: Sequence[str], groups: Groups
) -> Iterator[tuple[list[int], bool]]:
    """Return the gradients of each call by position, and whether they are reduced together.

    The last leaves are first, in the order of backward passes.
    """
    none = jax.dtypes.float0  # the type of values without derivative
    places = {name: i for i, name in enumerate(names) if leaves[i].dtype != none}
    grouped = _grouped(places, groups)
    for members in grouped:
        yield members, len(members) > 1
    taken = set(itertools.chain(*grouped))
    single = [i for i in reversed(places.values()) if i not in taken]
    if single and is_traced(leaves) and blocks_programs():
        yield single, False  # in one call, because each call would wait for the previous ones
        return
    for cut in batches(leaves[i].size * leaves[i].dtype.itemsize for i in single):
        yield [single[at] for at in cut], False


def _grouped(places: dict[str, int], groups: Groups) -> list[list[int]]:
    if isinstance(groups, int):
        return partition(list(places.values()), groups)
    named = [name for group in groups for name in group]
    unknown = [name for name in named if name not in places]
    if unknown or len(set(named)) < len(named):
        raise UsageError(
            f"groups={groups!r}: name gradients by their keys, each at most once, such as "
            f"{', '.join(list(places)[:3])}"
        )
    return [[places[name] for name in group] for group in groups if group]


def reduce_tree(tree: Any, prefix: str, reduction: GradientReduction, groups: Groups = 0) -> Any:
    """Return a pytree of gradients, or of updates, reduced over the ranks.

    Args:
        tree: arrays, concrete or traced.
        prefix: prefix of the operations' names, followed by the keys of a leaf.
        reduction: the reduction.
        groups: number of groups of consecutive leaves to reduce together, or the groups, by names.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    if not leaves or (reduction.alone and not _marks(leaves)):
        return tree
    leaves = [leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for leaf in leaves]
    names = path_names(tree)
    if reduction.alone:
        at = smallest([leaf.size for leaf in leaves])
        leaves[at] = allreduce(leaves[at], op=Sum, name=mark_name(prefix + names[at]))
        return jax.tree_util.tree_unflatten(structure, leaves)
    ends = []
    for members, together in _calls(leaves, names, groups):
        chosen, own = [leaves[i] for i in members], [names[i] for i in members]
        group = f"{prefix}group.{own[0]}" if together else None
        ends.append((members, _start(chosen, own, prefix, group, reduction)))
    for members, end in ends:
        for i, reduced in zip(members, end(), strict=True):
            leaves[i] = reduced
    return jax.tree_util.tree_unflatten(structure, leaves)


def _marks(leaves: Sequence[Any]) -> bool:
    """Return whether to mark this step; compiled ones can be marked only on a single CPU device."""
    compiled_elsewhere = jax.default_backend() != "cpu" or jax.local_device_count() > 1
    return marks_steps() and not (compiled_elsewhere and is_traced(leaves))


def _start(
    leaves: Sequence[Any],
    names: Sequence[str],
    prefix: str,
    group: str | None,
    reduction: GradientReduction,
) -> Callable[[], list[Any]]:
    """Start reducing gradients, or trace the reduction; return a function that waits for them."""
    to_send, restored = compressed(leaves, reduction.compression)
    lossy = isinstance(reduction.compression, Lossy)
    call = Allreduce(
        tuple(prefix + name for name in names),
        reduction.process_set,
        group,
        op=reduction.op,
        prescale=reduction.prescale,
        postscale=reduction.postscale,
        compression=reduction.compression if lossy else None,
        lasting=True,
        check_finite=reduction.check_finite,
        parameters=tuple(names),
        overwrites=True,
    )
    if is_traced(to_send):
        made = run(call, to_send)
        return lambda: restored(made)
    return call.start(to_send).then(restored).wait


def allreduce_gradients(
    gradients: Any,
    op: Op = Average,
    compression: Any = None,
    gradient_predivide_factor: float = 1.0,
    groups: Groups = 0,
    process_set: ProcessSet = global_process_set,
    *,
    name: str = "gradient",
    check_finite: bool = True,
) -> Any:
    """Return a pytree of gradients averaged over the ranks, for training loops without optax.

    Args:
        gradients: the result of ``jax.grad``, inside or outside ``jit``.
        op: Average, Sum or Adasum.
        compression: one of ``hvd.Compression``; None uses ``QSGD_BITS`` or ``QSGD_SCHEME``, else
            no compression.
        gradient_predivide_factor: gradients are divided by it before the sum and by size / factor
            after it.
        groups: number of groups of consecutive leaves to reduce together, or lists of names.
        process_set: the ranks that average; others get their own values.
        name: prefix of the operations' names; two models in one program need different ones.
        check_finite: whether NaN and Inf are errors, subject to ``QSGD_NONFINITE``.
    Raises:
        UsageError: invalid arguments.
    """
    reduction = checked_reduction(
        op,
        compression,
        gradient_predivide_factor,
        process_set=process_set,
        check_finite=check_finite and op is not Adasum,
        caller="allreduce_gradients",
    )
    return reduce_tree(gradients, f"{name}.", reduction, groups)
