"""Reduction of a pytree of gradients over the ranks, and the optimizer that uses it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from qsgd_hpc.compression import Lossy
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.grouping import batches, checked_passes, choose_groups, partition
from qsgd_hpc.frameworks.reduction import GradientReduction, checked_reduction, gradient_prefix
from qsgd_hpc.frameworks.shared_names import warn_of_shared_residual
from qsgd_hpc.frameworks.step_mark import mark_name, marks_steps, smallest
from qsgd_hpc.jax.compression import compressed
from qsgd_hpc.jax.ops import allreduce
from qsgd_hpc.jax.ops._collective import blocks_programs, is_traced, run
from qsgd_hpc.jax.ops._differentiable import Allreduce
from qsgd_hpc.runtime.feedback import Ownership, forget_ownerless
from qsgd_hpc.runtime.ops import Adasum, Average, Op, Sum
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    import optax

__all__ = [
    "AccumulationState",
    "DistributedOptimizer",
    "Groups",
    "allreduce_gradients",
    "path_names",
    "reduce_tree",
]

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


class AccumulationState(NamedTuple):
    """The state of an optimizer with ``backward_passes_per_step`` above 1."""

    passes: jax.Array
    """Number of passes since the last step; int32."""
    gradients: Any
    """The sum of their gradients."""
    inner: Any
    """The wrapped optimizer's state."""


def DistributedOptimizer(
    optimizer: optax.GradientTransformation,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[str]] | None = None,
    process_set: ProcessSet = global_process_set,
    check_finite: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optax optimizer so that every step uses the average of all ranks' gradients.

    The result is a gradient transformation whose ``update`` can be jitted and chained.
    Its state is the wrapped optimizer's, so checkpoints of both are the same, except for
    ``backward_passes_per_step`` above 1. If ``update`` is passed ``value=``, the loss, as
    ``optax.contrib.reduce_on_plateau`` requires, the optimizer gets the mean of all ranks' values.

    Args:
        optimizer: any optax gradient transformation.
        compression: one of ``hvd.Compression``; None uses ``QSGD_BITS`` or ``QSGD_SCHEME``,
            else no compression.
        backward_passes_per_step: number of calls of ``update`` whose gradients are summed
            before a reduction; the updates are zero in between. Divide the loss by it to get the
            mean.
        op: Average, Sum, or Adasum. With Adasum, each rank's optimizer uses its own gradients, and
            the ranks' updates are combined, uncompressed.
        gradient_predivide_factor: splits the average: gradients are divided by it before the
            sum and by size / factor after it, which keeps sums of float16 in range.
        num_groups: deprecated: a number for ``groups``.
        groups: number of groups of neighbouring gradients, or the groups as lists of names
            (the keys that lead to a parameter, with dots between): the gradients of a group are
            reduced together.
        process_set: the ranks that average; ranks outside the set train separately.
        check_finite: whether NaN and Inf in a gradient are errors, on every rank. False
            passes them on, for an ``optax.apply_if_finite`` inside; around this optimizer it would
            make each rank decide by its own gradients.
    Raises:
        UsageError: invalid arguments, or ``init`` has not been called.
    """
    import optax

    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise UsageError(
            f"DistributedOptimizer wraps an optimizer of optax, such as optax.adam(1e-3), not a "
            f"{type(optimizer).__name__}"
        )
    passes = checked_passes(backward_passes_per_step)
    reduction = checked_reduction(
        op,
        compression,
        gradient_predivide_factor,
        process_set=process_set,
        check_finite=check_finite and op is not Adasum,
    )
    grouping = choose_groups(num_groups, groups)
    inner = optax.with_extra_args_support(optimizer)
    reduced = _reduced(inner, gradient_prefix(process_set), reduction, grouping)
    return reduced if passes == 1 else _accumulated(reduced, passes)


def _reduced(
    inner: optax.GradientTransformationExtraArgs,
    prefix: str,
    reduction: GradientReduction,
    groups: Groups,
) -> optax.GradientTransformationExtraArgs:
    import optax

    residuals = _Residuals(prefix, reduction)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        residuals.use()
        if not reduction.alone:
            extra = _agreed(extra, prefix, reduction)
        if reduction.op is Adasum:
            updates, state = inner.update(gradients, state, params, **extra)
            return reduce_tree(updates, prefix, reduction, groups), state
        averages = reduce_tree(gradients, prefix, reduction, groups)
        if "grad" in extra:
            extra["grad"] = averages
        updates, state = inner.update(averages, state, params, **extra)
        return updates, state

    def init(params: Any) -> Any:
        residuals.begin(params)
        return inner.init(params)

    weakref.finalize(update, residuals.end).atexit = False
    return optax.GradientTransformationExtraArgs(init, update)


class _Residuals:
    """The error feedback of one optimizer; each training with it begins without.

    Args:
        prefix: prefix of the names of its operations.
        reduction: the reduction of its gradients.
    """

    def __init__(self, prefix: str, reduction: GradientReduction) -> None:
        self._prefix = prefix
        self._reduction = reduction
        self._owned = Ownership()
        self._used = False

    def use(self) -> None:
        """Note that gradients are reduced, or that their reduction is traced."""
        self._owned.use()
        self._used = True

    def end(self) -> None:
        """Note that the optimizer is gone."""
        self._owned.end()

    def begin(self, params: Any) -> None:
        """Begin a training; warn if other parameters with the same names are still in use."""
        leaves = jax.tree_util.tree_leaves(params)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return  # perhaps only the state's shape is asked for
        if self._used:  # also if it is not traced again
            self.end()
        forget_ownerless()
        for name, leaf in zip(path_names(params), leaves, strict=True):
            if isinstance(leaf, jax.Array):
                self._name(name, leaf)

    def _name(self, name: str, leaf: jax.Array) -> None:
        coding = self._reduction.coding(name, leaf.shape, str(leaf.dtype))
        if coding is not None and coding.error_feedback and not self._reduction.alone:
            full = self._prefix + name
            self._owned.names.add(full)
            warn_of_shared_residual(full, leaf, coding, self._reduction.process_set)


def _agreed(extra: dict[str, Any], prefix: str, reduction: GradientReduction) -> dict[str, Any]:
    """Return what an optimizer gets besides gradients, with the mean of the ranks' losses.

    Raises:
        UsageError: a line search would use the loss of this rank's batch.
    """
    if "value_fn" in extra:
        raise UsageError(
            "DistributedOptimizer: the line search of this optimizer calls value_fn, which is the "
            "loss of this rank's batch, so the ranks would take different steps. Average it in "
            "value_fn with hvd.allreduce and use the optimizer itself, with averaged gradients"
        )
    if extra.get("value") is None:
        return extra
    value = jnp.asarray(extra["value"])
    mean = allreduce(value, name=f"value.{prefix}", op=Average, process_set=reduction.process_set)
    return {**extra, "value": mean}


def _accumulated(
    inner: optax.GradientTransformationExtraArgs, passes: int
) -> optax.GradientTransformationExtraArgs:
    import optax

    def init(params: Any) -> AccumulationState:
        zeros = jax.tree_util.tree_map(jnp.zeros_like, params)
        return AccumulationState(jnp.zeros([], jnp.int32), zeros, inner.init(params))

    def update(
        gradients: Any, state: AccumulationState, params: Any = None, **extra: Any
    ) -> tuple[Any, AccumulationState]:
        total = jax.tree_util.tree_map(jnp.add, state.gradients, gradients)

        def step() -> tuple[Any, AccumulationState]:
            updates, after = inner.update(total, state.inner, params, **extra)
            zeros = jax.tree_util.tree_map(jnp.zeros_like, total)
            return updates, AccumulationState(jnp.zeros([], jnp.int32), zeros, after)

        def wait() -> tuple[Any, AccumulationState]:
            shapes, _ = jax.eval_shape(step)
            updates = jax.tree_util.tree_map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            return updates, AccumulationState(state.passes + 1, total, state.inner)

        updates, after = jax.lax.cond(state.passes + 1 >= passes, step, wait)
        return updates, after

    return optax.GradientTransformationExtraArgs(init, update)
