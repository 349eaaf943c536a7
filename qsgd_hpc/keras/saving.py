"""Load a saved model and continue to train it on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import keras
import numpy as np

from qsgd_hpc.keras.optimizer import DistributedOptimizer

__all__ = ["load_model"]


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
        _complete(model.optimizer, model.trainable_variables, filepath)
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **options)
        if keras.backend.backend() == "tensorflow":
            model.jit_compile = False  # a file has what "auto" meant where it was written
    return model


def _complete(optimizer: Any, variables: list[Any], filepath: str | PathLike[str]) -> None:
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
