"""Reduction of gradients over the ranks, for tapes, TF1's optimizers and Keras."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from qsgd_hpc import env
from qsgd_hpc.errors import UnsupportedError
from qsgd_hpc.frameworks.grouping import BATCH_BYTES, batches, partition
from qsgd_hpc.frameworks.reduction import GradientReduction, compressor_of
from qsgd_hpc.frameworks.shared_names import claim_residual
from qsgd_hpc.frameworks.step_mark import mark_name, marks_steps, smallest
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Adasum, Sum
from qsgd_hpc.tensorflow.ops import allreduce
from qsgd_hpc.tensorflow.ops._names import name_of, operation_names, unwrapped, warn_of_threads
from qsgd_hpc.tensorflow.ops._run import run, without_autograph

__all__ = ["Groups", "LocalSources", "reduce_gradients"]

Groups = int | Sequence[Sequence[Any]]


class LocalSources:
    """Variables that belong to one rank, such as its part of a large embedding.

    Args:
        scale: divide their gradients by the number of ranks, as the average does for shared
            variables, so that both have the same scale.
    """

    def __init__(self, scale: bool = True) -> None:
        self._scale = scale
        self._sources: dict[int, Any] = {}  # by id; keeps them alive, so that no id is reused

    def add(self, source: Any) -> None:
        """Exclude a variable from now on."""
        own = unwrapped(source)
        self._sources[id(own)] = own

    def add_layers(self, layers: Any) -> None:
        """Exclude the trainable variables of one or several Keras layers."""
        for layer in layers if isinstance(layers, Iterable) else [layers]:
            for variable in layer.trainable_weights:
                self.add(variable)

    def __contains__(self, source: Any) -> bool:
        return id(unwrapped(source)) in self._sources

    def scaled(self, gradient: Any, size: int) -> Any:
        """Return the gradient of a local source, divided by the number of ranks if ``scale``."""
        if gradient is None or not self._scale or size == 1:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
        return gradient / size


@without_autograph
def reduce_gradients(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    reduction: GradientReduction,
    *,
    groups: Groups = 0,
    local: LocalSources | None = None,
    name: str = "gradient",
    numbered: bool = False,
) -> list[Any]:
    """Return every gradient's average, or other reduction, over the ranks.

    Works eagerly, in ``tf.function`` and in TF1's graphs. In the latter two, an operation starts
    when its gradients are computed, so that it overlaps with the rest of the backward pass.

    Args:
        gradients: for each variable a tensor, a ``tf.IndexedSlices``, or None, which stays None;
            the same variables must have gradients on every rank.
        variables: variables of TensorFlow or Keras, or watched tensors, in the same order on every
            rank.
        reduction: the reduction.
        groups: number of groups of consecutive variables to reduce together, or the groups as
            lists of variables. Sparse gradients are reduced separately.
        local: variables whose gradients are not reduced.
        name: prefix of the operations' names.
        numbered: name operations by the variables' numbers, not their names; local ones do not
            count.
    Returns:
        the reduced gradients, with the same dtypes and shapes.
    Raises:
        UsageError: groups with unknown variables, or sparse gradients for Adasum.
        HorovodInternalError: a reduction failed.
    """
    results = list(gradients)
    if reduction.alone:
        return _marked(results, variables, reduction, name) if marks_steps() else results
    own = local or LocalSources()
    numbers = itertools.count()
    labels = [
        str(next(numbers)) if numbered and each not in own else name_of(each) for each in variables
    ]
    names = operation_names(_prefix(name, reduction), labels)
    warn_of_threads(names, variables)
    dense = []
    for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
        if variable in own:
            results[i] = own.scaled(gradient, len(ops.ranks_of(reduction.process_set)))
        elif _is_sparse(gradient) and not reduction.sparse_as_dense:
            results[i] = _reduce_slices(gradient, names[i], reduction)
        elif gradient is not None:
            dense.append(_Dense.of(i, names[i], gradient, variable, reduction))
    for members, group in _calls(dense, variables, groups):
        for member, result in zip(members, _reduce(members, group, reduction), strict=True):
            results[member.position] = result
    return results


def _marked(
    gradients: list[Any], variables: Sequence[Any], reduction: GradientReduction, prefix: str
) -> list[Any]:
    """Return a single rank's gradients unchanged; one goes through the engine, to mark the step."""
    places = [i for i, gradient in enumerate(gradients) if gradient is not None]
    if not places:
        return gradients
    values = [gradients[i].values if _is_sparse(gradients[i]) else gradients[i] for i in places]
    at = smallest([value.shape.num_elements() for value in values])
    names = operation_names(_prefix(prefix, reduction), [*map(name_of, variables)])
    name = names[places[at]]
    passed, original = allreduce(values[at], op=Sum, name=mark_name(name)), gradients[places[at]]
    if _is_sparse(original):
        passed = tf.IndexedSlices(passed, original.indices, original.dense_shape)
    gradients[places[at]] = passed
    return gradients


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _prefix(name: str, reduction: GradientReduction) -> str:
    number = reduction.process_set.process_set_id
    return f"{name}.set{number}." if number else f"{name}."


@dataclass(frozen=True, eq=False)
class _Dense:
    """A dense gradient, and its compressed form."""

    position: int
    name: str
    variable: Any
    to_send: Any
    context: Any

    @classmethod
    def of(
        cls, position: int, name: str, gradient: Any, variable: Any, reduction: GradientReduction
    ) -> _Dense:
        compressor = compressor_of(reduction.compression)
        compressed = compressor.compress(tf.convert_to_tensor(gradient))
        return cls(position, name, unwrapped(variable), *compressed)

    @property
    def size_bytes(self) -> int:
        """Bytes to send; a size that is known only at run time counts as large."""
        count = self.to_send.shape.num_elements()
        return BATCH_BYTES if count is None else int(count) * self.to_send.dtype.size

    def operation(self, reduction: GradientReduction, group: ops.Group | None) -> ops.Operation:
        """Return the description of the reduction, without shape and dtype."""
        shape = self.to_send.shape
        if not shape.is_fully_defined():
            shape = tf.TensorShape(self.variable.shape)
        coding = None
        if shape.is_fully_defined():  # else uncompressed: no rank knows the size while tracing
            # A list of ints: after disable_v2_behavior() a shape contains Dimension objects.
            sizes = tuple(shape.as_list())
            coding = reduction.coding(name_of(self.variable), sizes, self.to_send.dtype.name)
        if isinstance(self.variable, tf.Variable):
            claim_residual(self.name, self.variable, coding, reduction.process_set)
        return reduction.operation(self.name, coding, group)


def _calls(
    dense: Sequence[_Dense], variables: Sequence[Any], groups: Groups
) -> Iterator[tuple[Sequence[_Dense], ops.Group | None]]:
    """Return the gradients of each call, in the order in which a backward pass computes them."""
    backward = dense[::-1]
    grouped = _in_groups(backward, variables, groups)
    for members in grouped:
        yield members, ops.Group(f"group.{members[0].name}", len(members))
    taken = set(itertools.chain(*grouped))
    single = [each for each in backward if each not in taken]
    if tf.executing_eagerly():  # all gradients are already computed
        cuts = [list(range(len(single)))] if single else []
    else:
        cuts = batches(each.size_bytes for each in single)
    for cut in cuts:
        yield [single[i] for i in cut], None


def _in_groups(
    dense: Sequence[_Dense], variables: Sequence[Any], groups: Groups
) -> list[list[_Dense]]:
    if isinstance(groups, int):
        return partition(dense, groups)
    own = {id(each.variable): each for each in dense}
    lists = [[unwrapped(member) for member in group] for group in groups]
    chosen = partition([unwrapped(variable) for variable in variables], lists)
    members = [[own[id(member)] for member in group if id(member) in own] for group in chosen]
    return [group for group in members if group]


def _reduce(
    members: Sequence[_Dense], group: ops.Group | None, reduction: GradientReduction
) -> list[Any]:
    operations = [member.operation(reduction, group) for member in members]
    reduced = run("qsgd_allreduce", operations, tensors=[member.to_send for member in members])
    compressor = compressor_of(reduction.compression)
    return [
        compressor.decompress(tensor, member.context)
        for tensor, member in zip(reduced, members, strict=True)
    ]


def _reduce_slices(slices: Any, name: str, reduction: GradientReduction) -> Any:
    """Return the entries of all ranks, concatenated."""
    if reduction.op is Adasum:
        raise UnsupportedError(
            f"'{name}' is sparse; op=hvd.Adasum does not support sparse gradients: pass "
            "sparse_as_dense=True, or op=hvd.Average"
        )
    reduced = allreduce(slices, op=reduction.op, name=name, process_set=reduction.process_set)
    if not reduction.check_finite or env.get("QSGD_NONFINITE") != "error":
        return reduced
    values = tf.debugging.check_numerics(
        reduced.values,
        f"'{name}', which is sparse, holds NaN or Inf on some rank. Lower the learning rate or "
        "scale the loss; QSGD_NONFINITE=warn or =propagate lets training go on",
    )
    return tf.IndexedSlices(values, reduced.indices, reduced.dense_shape)
