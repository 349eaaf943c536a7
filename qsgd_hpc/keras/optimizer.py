"""``DistributedOptimizer`` for Keras and the loading of its models: averages over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import keras
import numpy as np

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.grouping import checked_passes, choose_groups
from qsgd_hpc.frameworks.reduction import checked_reduction
from qsgd_hpc.keras._synchronized import (
    Synchronization,
    Synchronized,
    SynchronizedFirst,
    SynchronizedInStep,
    patch,
    patch_keras,
    synchronizations,
)
from qsgd_hpc.runtime.ops import Adasum, Average, Op
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "load_model",
    "synchronization_of",
]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that uses the average of all ranks' gradients in every step.

    Pass it to ``model.compile``. It is an instance of the optimizer's class, shares its state, and
    is saved as that optimizer, so that a saved model loads without this package. Before the first
    step every rank gets the first rank's variables, if the model is built by then. At the end of
    ``fit`` the ranks compare their variables, so that a training without synchronisation is
    detected. Copies by ``pickle``, ``copy.deepcopy`` and ``hvd.broadcast_object``, of it or of its
    model, are distributed, too; ``clone_model`` uses the saved form, so compile the clone with
    another one.

    Args:
        optimizer: any optimizer of Keras, a custom one, or a name.
        name: accepted for compatibility; the optimizer keeps its name.
        device_dense: accepted for compatibility.
        device_sparse: accepted for compatibility.
        compression: one of ``hvd.Compression``; None uses ``QSGD_BITS`` or ``QSGD_SCHEME``, else
            no compression.
        sparse_as_dense: makes sparse gradients dense before they are reduced.
        gradient_predivide_factor: splits the average: gradients are divided by it before the
            sum, and by size / factor after it.
        op: Average or Sum.
        backward_passes_per_step: number of steps whose gradients are summed before a reduction
            and an update; it becomes the optimizer's ``gradient_accumulation_steps``.
        average_aggregated_gradients: whether these gradients are averaged instead of summed.
        num_groups: deprecated: a number for ``groups``.
        groups: number of groups of neighbouring gradients to reduce together, or the groups as
            lists of variables.
        process_set: the ranks that average; ranks outside the set train separately.
        scale_local_gradients: see :func:`PartialDistributedOptimizer`, and
            ``register_local_var(variable)`` of the result.
    Raises:
        UsageError: invalid arguments.
    """
    if op is Adasum:
        raise UsageError(
            "DistributedOptimizer(op=Adasum): Keras's optimizers average or sum gradients; choose "
            "hvd.Average or hvd.Sum"
        )
    grouping = choose_groups(num_groups, groups)
    reduction = checked_reduction(
        op, compression, gradient_predivide_factor, sparse_as_dense, process_set
    )
    if optimizer is None:
        raise UsageError("DistributedOptimizer(None): pass an optimizer of Keras")
    optimizer = keras.optimizers.get(optimizer)
    if synchronization_of(optimizer) is not None:
        raise UsageError("this optimizer is already a DistributedOptimizer; wrap it once")
    passes = checked_passes(backward_passes_per_step)
    _accumulate(getattr(optimizer, "inner_optimizer", optimizer), passes)
    # Keras divides the accumulated sum by the number of passes.
    factor = 1.0 if average_aggregated_gradients else float(passes)
    ranks = 1 if reduction.alone else process_set.size() or 1
    local_factor = factor / (ranks if scale_local_gradients else 1)
    synchronization = Synchronization(reduction, grouping, (), local_factor, factor)
    return _synchronized(optimizer, synchronization)


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a :func:`DistributedOptimizer` that does not reduce some layers' gradients.

    Args:
        local_layers: one or several built layers, whose variables differ from rank to
            rank, such as parts of a model that is distributed over the ranks.
        scale_local_gradients: whether their gradients are divided by the number of ranks, as
            for a mean over all ranks' samples.
    """
    local = _variables_of(local_layers)
    distributed = DistributedOptimizer(
        optimizer,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    synchronization = synchronization_of(distributed)
    assert synchronization is not None
    for variable in local:
        synchronization.add_local(variable)
    return distributed


def synchronization_of(optimizer: Any) -> Synchronization | None:
    """Return the synchronization of an optimizer, if it is distributed."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner._synchronization if isinstance(inner, Synchronized) else None


def _variables_of(layers: Any) -> list[Any]:
    chosen = [layers] if isinstance(layers, keras.layers.Layer) else list(layers or ())
    for layer in chosen:
        if not isinstance(layer, keras.layers.Layer):
            raise UsageError(f"local_layers has {layer!r}, which is not a layer of Keras")
        if not layer.built:
            raise UsageError(
                f"local_layers: layer {layer.name!r} is not built, so its variables are not known; "
                "call the model on a batch first"
            )
    return [v for layer in chosen for v in layer.trainable_variables]


def _synchronized(optimizer: Any, synchronization: Synchronization) -> Any:
    """Return an optimizer of the same class and state whose steps are synchronised."""
    patch_keras()
    saveable = next(each for each in keras.Model.__mro__ if "__reduce__" in vars(each))
    patch(saveable, "__reduce__", functools.partial(_keeping_copies, saveable))
    # A loss scaler checks gradients before it passes them to its inner optimizer, which is wrapped.
    scaler = optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None
    wrapped = _wrapped(optimizer if scaler is None else scaler.inner_optimizer)
    wrapped.__dict__["_synchronization"] = synchronization
    if scaler is None:
        return wrapped
    scaler.inner_optimizer = wrapped
    return scaler


def _keeping_copies(kind: Any, own: Any) -> Any:
    """Make pickles and deep copies of models and optimizers contain the synchronisation.

    Keras copies only what it saves in a file, which lacks the synchronisation: a model from
    ``broadcast_object`` would then train separately on some ranks while the root waits for them.
    """

    def __reduce__(saveable: Any) -> Any:
        options = _copied(saveable)
        _, arguments = own(saveable)
        # Not a method of the object's class, which pickle cannot find for a distributed optimizer.
        plain = (kind._unpickle_model, arguments)
        return plain if options is None else (_redistributed, (*plain, *options))

    return __reduce__


def _copied(saveable: Any) -> tuple[Any, Any] | None:
    """Return what makes Keras's copy of a model or optimizer distributed, or None."""
    optimizer = getattr(saveable, "optimizer", saveable)
    synchronization = synchronization_of(optimizer)
    if synchronization is None:
        if synchronizations(optimizer):
            raise UsageError(
                "a copy of this MultiOptimizer would train each rank separately, because only its "
                "members are distributed: use hvd.DistributedOptimizer(MultiOptimizer(...))"
            )
        return None
    if isinstance(saveable, keras.Model):
        # Operations get their names when a step is traced, which happens twice if tracing creates
        # variables. A copy already has its variables; build and retrace the original, so that its
        # operations get the same names as the copy's.
        if saveable.built and not optimizer.built:
            optimizer.build(saveable.trainable_variables)
        saveable.train_function = None
    paths = [v.path for v in _all_variables(saveable)]
    return paths, synchronization.copy_arguments()


def _redistributed(load: Any, arguments: Any, paths: list[str], options: tuple[Any, ...]) -> Any:
    copy = load(*arguments)
    # Keras may give a copy's variables other names, but ranks match operations by these names.
    for variable, path in zip(_all_variables(copy), paths, strict=False):
        variable._path = path
    synchronization = Synchronization.restored(*options)
    if isinstance(copy, keras.optimizers.Optimizer):
        return _synchronized(copy, synchronization)
    copy.optimizer = _synchronized(copy.optimizer, synchronization)
    return copy


def _all_variables(saveable: Any) -> list[Any]:
    optimizer = getattr(saveable, "optimizer", None)
    return [*saveable.variables, *([] if optimizer is None else optimizer.variables)]


def _accumulate(optimizer: Any, passes: int) -> None:
    own = optimizer.gradient_accumulation_steps or 1
    if passes in (1, own):
        return
    several = getattr(keras.optimizers, "MultiOptimizer", ())  # not in every Keras 3
    if own != 1 or optimizer.built or isinstance(optimizer, several):
        raise UsageError(
            f"backward_passes_per_step={passes} with {optimizer.name!r}, which "
            + ("has gradient_accumulation_steps of its own" if own != 1 else "cannot change to it")
            + f"; pass gradient_accumulation_steps={passes} to the optimizer that is wrapped"
        )
    optimizer.gradient_accumulation_steps = passes


def _wrapped(optimizer: Any) -> Any:
    """Return an object that shares the optimizer's state and whose steps are synchronised."""
    kind = type(optimizer)
    plain = kind.apply is keras.optimizers.Optimizer.apply
    ours = SynchronizedInStep if plain else SynchronizedFirst
    # Keras saves the name of __class__: use the optimizer's own class, which any process can load.
    attributes = {"__class__": property(lambda _: kind), "__module__": kind.__module__}
    wrapped: Any = type(kind.__name__, (ours, kind), attributes)
    distributed = wrapped.__new__(wrapped)
    object.__setattr__(distributed, "__dict__", optimizer.__dict__)
    return distributed


def load_model(
    filepath: str | PathLike[str],
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    **options: Any,
) -> Any:
    """Return a saved model whose optimizer, if it has one, is distributed.

    Args:
        filepath: a file of ``model.save``, with a distributed optimizer or without.
        custom_optimizers: classes of optimizers that are not part of Keras.
        custom_objects: other custom classes and functions, by name.
        compression: one of ``hvd.Compression``; see :func:`DistributedOptimizer`.
        options: other arguments of :func:`DistributedOptimizer`, which a file does not contain.
    """
    named = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        _restore_state(model.optimizer, model.trainable_variables, filepath)
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **options)
        if keras.backend.backend() == "tensorflow":
            model.jit_compile = False  # a file has what "auto" meant where it was written
    return model


def _restore_state(optimizer: Any, variables: list[Any], filepath: str | PathLike[str]) -> None:
    """Restore the state of an optimizer from an HDF5 file, which Keras 3 omits.

    Keras builds the optimizer only for variables that the model owns directly, not for its layers'
    variables: it then has no momenta, and cannot train.
    """
    scaler = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scaler or not optimizer.built or optimizer._trainable_variables or not variables:
        return
    import h5py
    from keras.src.legacy.saving import legacy_h5_format

    optimizer.built = False
    optimizer.build(variables)
    with h5py.File(filepath) as file:
        values = legacy_h5_format.load_optimizer_weights_from_hdf5_group(file)
        for variable, value in zip(optimizer.variables, values, strict=True):
            variable.assign(np.asarray(value))
