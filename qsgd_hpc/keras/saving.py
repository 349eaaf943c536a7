"""Load a saved model to train it further on all ranks."""

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
        filepath: what ``model.save`` has written, with a distributed optimizer or without.
        custom_optimizers: classes of optimizers that Keras does not ship.
        custom_objects: other classes and functions of yours, by name.
        compression: one of ``hvd.Compression``; see :func:`DistributedOptimizer`.
        options: what :func:`DistributedOptimizer` was given besides; a file holds none of it.
    """
    named = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        _complete(model.optimizer, model.trainable_variables, filepath)
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **options)
    return model


def _complete(optimizer: Any, variables: list[Any], filepath: str | PathLike[str]) -> None:
    """Give an optimizer from an HDF5 file the state that Keras 3 leaves out.

    Keras builds it for the variables that the model holds itself, not for those of its layers: it
    then has no momenta, and cannot train.
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
