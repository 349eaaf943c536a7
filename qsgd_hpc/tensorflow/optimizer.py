"""``DistributedOptimizer`` of TF1's optimizers; Keras's are passed to :mod:`qsgd_hpc.keras`.

Optimizers of ``tf.compat.v1.train`` may accumulate several passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.grouping import checked_passes, choose_groups
from qsgd_hpc.frameworks.reduction import GradientReduction, checked_reduction
from qsgd_hpc.runtime.ops import Adasum, Average, Op
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.tensorflow.gradients import Groups, LocalSources, reduce_gradients

__all__ = ["DistributedOptimizer"]

Reduce = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap an optimizer so that every step uses the average of all ranks' gradients.

    Args:
        optimizer: one of ``tf.compat.v1.train``, or one of Keras.
        name: name of the wrapper; default: "Distributed" and the optimizer's name.
        use_locking: accepted for compatibility; the wrapped optimizer's own setting is used.
        device_dense: accepted for compatibility; a gradient is reduced on its own device.
        device_sparse: likewise.
        compression: one of ``hvd.Compression``; None uses ``QSGD_BITS`` or ``QSGD_SCHEME``,
            else no compression.
        sparse_as_dense: makes ``tf.IndexedSlices`` dense before they are reduced; else all ranks'
            entries are gathered, uncompressed, which is efficient if there are few.
        backward_passes_per_step: number of steps whose gradients are summed, dense, before a
            reduction; variables change with the last of them, and ``global_step`` with each.
        op: Average, Sum, or Adasum. With Adasum, each rank executes the optimizer's step with
            its own gradients and the ranks' steps are combined.
        gradient_predivide_factor: splits the average: gradients are divided by it before the
            sum and by size / factor after it, which keeps sums of float16 in range.
        average_aggregated_gradients: divide the sums by ``backward_passes_per_step``.
        num_groups: deprecated: a number for ``groups``.
        groups: number of groups of neighbouring variables to reduce together, or the groups as
            lists of variables.
        process_set: the ranks that average; ranks outside the set train separately.
        scale_local_gradients: divide gradients of local sources by the number of ranks, as the
            average does with all others.
    Returns:
        An optimizer of the same kind, with ``register_local_var``.
    Raises:
        UsageError: not an optimizer of these kinds, or arguments out of range.
    """
    passes = checked_passes(backward_passes_per_step)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if isinstance(optimizer, GraphOptimizer):
            raise UsageError("this optimizer is already a DistributedOptimizer; wrap it once")
        reduction = checked_reduction(
            op, compression, gradient_predivide_factor, sparse_as_dense, process_set
        )
        return GraphOptimizer(
            optimizer,
            reduction,
            name=name,
            passes=passes,
            mean_of_passes=average_aggregated_gradients,
            groups=choose_groups(num_groups, groups),
            scale_local_gradients=scale_local_gradients,
        )
    if isinstance(optimizer, tf.keras.optimizers.Optimizer):
        from qsgd_hpc import keras

        return keras.DistributedOptimizer(
            optimizer,
            name=name,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            backward_passes_per_step=passes,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            average_aggregated_gradients=average_aggregated_gradients,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    raise UsageError(
        f"DistributedOptimizer({type(optimizer).__name__}): pass an optimizer of "
        "tf.compat.v1.train or of tf.keras.optimizers"
    )


class Accumulation:
    """Sums of gradients in variables of the graph, or, in TF2, in variables of this object.

    Args:
        passes: number of passes.
        mean: divide the sums by ``passes``.
    """

    def __init__(self, passes: int, mean: bool) -> None:
        self._passes = passes
        self._mean = mean
        self._complete: Any = None
        self._sums: list[Any] = []
        self._kept: dict[Any, tuple[Any, list[Any]]] = {}

    def _sums_for(self, variables: Sequence[Any]) -> tuple[Any, list[Any]]:
        if not tf.compat.v1.executing_eagerly_outside_functions():
            return _new_sums(variables)  # part of the graph that this call builds
        key = tuple(variable.ref() for variable in variables)
        if key not in self._kept:
            with tf.init_scope():
                self._kept[key] = _new_sums(variables)
        return self._kept[key]

    def add(self, gradients: Sequence[Any], variables: Sequence[Any], reduce: Reduce) -> list[Any]:
        """Add gradients; return the sums, reduced in the last pass of a step."""
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        passes, self._sums = self._sums_for([variables[i] for i in present])
        added = [
            tf.compat.v1.assign_add(total, tf.convert_to_tensor(gradients[i]))
            for total, i in zip(self._sums, present, strict=True)
        ]
        passed = tf.compat.v1.assign_add(passes, 1)
        self._complete = tf.equal(passed % self._passes, 0)
        factor = 1 / self._passes if self._mean else 1

        def reduced() -> list[Any]:
            return reduce([total * factor for total in added], [variables[i] for i in present])

        sums = tf.cond(self._complete, reduced, lambda: [tf.identity(total) for total in added])
        results = list(gradients)
        for i, total in zip(present, sums, strict=True):
            results[i] = total
        return results

    def when_complete(self, step: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Return an operation that executes the step and clears the sums, in a step's last pass.

        In the other passes it executes ``otherwise``.
        """

        def finish() -> Any:
            done = step()
            with tf.control_dependencies([] if done is None else [done]):  # None: eager mode
                cleared = [tf.compat.v1.assign(s, tf.zeros_like(s)) for s in self._sums]
            with tf.control_dependencies(cleared):
                return tf.constant(True)

        def wait() -> Any:
            done = otherwise()
            with tf.control_dependencies([] if done is None else [done]):
                return tf.constant(False)

        return tf.cond(self._complete, finish, wait)


def _new_sums(variables: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the number of added gradients, and their sums."""
    made = functools.partial(tf.compat.v1.Variable, trainable=False)
    passes = made(0, name="passes", dtype=tf.int64)
    zeros = [(v.name.partition(":")[0], tf.zeros(v.shape, v.dtype.base_dtype)) for v in variables]
    return passes, [made(zero, name=f"{name}/sum") for name, zero in zeros]


class GraphOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """A wrapper of an optimizer that uses the gradients of all ranks.

    Args:
        optimizer: the wrapped optimizer, which keeps its slots, and their names in checkpoints.
        reduction: the reduction of a gradient.
        name: name of this optimizer.
        passes: number of calls of ``apply_gradients`` whose gradients are summed before a
            reduction.
        mean_of_passes: divide the sums by ``passes``.
        groups: number of groups of gradients to reduce together, or the groups.
        scale_local_gradients: see :class:`LocalSources`.
    """

    def __init__(
        self,
        optimizer: Any,
        reduction: GradientReduction,
        *,
        name: str | None = None,
        passes: int = 1,
        mean_of_passes: bool = False,
        groups: Groups = 0,
        scale_local_gradients: bool = True,
    ) -> None:
        super().__init__(use_locking=False, name=name or f"Distributed{optimizer.get_name()}")
        self._optimizer = optimizer
        self._reduction = reduction
        self._groups = groups
        self._local = LocalSources(scale_local_gradients)
        self._accumulation = Accumulation(passes, mean_of_passes) if passes > 1 else None

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of a variable; see ``scale_local_gradients``."""
        self._local.add(var)

    register_local_source = register_local_var

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return the wrapped optimizer's gradients, averaged over the ranks.

        With several passes per step, these are the sums so far, which are averaged only in the
        last pass; with Adasum, they are this rank's own gradients.
        """
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        if self._combines_steps and self._accumulation is None:
            return list(pairs)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if self._accumulation is None:
            gradients = self._reduced(gradients, variables)
        else:
            gradients = self._accumulation.add(gradients, variables, self._reduced)
        return list(zip(gradients, variables, strict=True))

    @property
    def _combines_steps(self) -> bool:
        """Whether the ranks' steps are reduced instead of their gradients."""
        return self._reduction.op is Adasum and not self._reduction.alone

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if self._combines_steps:
            return list(gradients)
        return reduce_gradients(
            gradients, variables, self._reduction, groups=self._groups, local=self._local
        )

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: Any = None
    ) -> Any:
        """Execute the wrapped optimizer's step; with several passes per step, in the last one.

        ``global_step`` counts all passes, because scripts end the training by it.
        """
        pairs = list(grads_and_vars)

        def step() -> Any:
            if self._combines_steps:
                return self._combined_step(pairs, global_step, name)
            return self._optimizer.apply_gradients(pairs, global_step, name)

        def count() -> Any:
            return None if global_step is None else tf.compat.v1.assign_add(global_step, 1)

        if self._accumulation is None:
            return step()
        return self._accumulation.when_complete(step, otherwise=count)

    def _combined_step(self, pairs: Any, global_step: Any, name: Any) -> Any:
        """Execute the step, then replace it by the Adasum of all ranks' steps."""
        variables = [v for g, v in pairs if g is not None and v not in self._local]
        # Copies, because the tensor of a TF1 variable may share its memory.
        starts = [tf.raw_ops.DeepCopy(x=tf.convert_to_tensor(v)) for v in variables]
        with tf.control_dependencies(starts):
            applied = self._optimizer.apply_gradients(pairs, global_step, name)
        with tf.control_dependencies([applied]):
            steps = [v.read_value() - start for v, start in zip(variables, starts, strict=True)]
        combined = reduce_gradients(steps, variables, self._reduction)
        return tf.group(
            *(
                tf.compat.v1.assign(v, start + step)
                for v, start, step in zip(variables, starts, combined, strict=True)
            )
        )

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Return a slot of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Return the names of the wrapped optimizer's slots."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Return the variables of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)
