"""Calls of Keras 2, as in scripts written for Horovod, for use with Keras 3.

They are added when a script imports ``horovod.keras``, ``horovod.tensorflow`` or their modules.
Existing calls of Keras 3 keep their behaviour. docs/horovod.md has the table.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from qsgd_hpc._notices import report
from qsgd_hpc.errors import UsageError
from qsgd_hpc.launch.supervise import launched_rank

__all__ = ["allow_keras2_calls"]

_MARK = "_qsgd_hpc_keras2"


def allow_keras2_calls() -> None:
    """Make calls of Keras 2 work in this process if Keras 3 is loaded; idempotent."""
    keras: Any = sys.modules.get("keras")
    if keras is None or not keras.__version__.startswith("3.") or hasattr(keras, _MARK):
        return
    setattr(keras, _MARK, True)
    _extend_optimizers(keras)
    _extend_models(keras)
    _extend_checkpoints(keras)
    _extend_backend(keras)
    _add(keras.metrics.Metric, "reset_states", lambda metric: metric.reset_state())
    if os.environ.get("TF_USE_LEGACY_KERAS", "0") not in ("1", "true", "True"):
        _explain_layers()


def _owner(kind: type, name: str) -> Any:
    """Return the class that defines an attribute of a class."""
    return next(each for each in kind.__mro__ if name in vars(each))


def _add(kind: Any, name: str, function: Any) -> None:
    if not hasattr(kind, name):
        setattr(kind, name, function)


def _replace(kind: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Replace a method by ``change(method)``, in the class that defines it."""
    owner = _owner(kind, name)
    own = vars(owner)[name]
    setattr(owner, name, functools.wraps(own)(change(own)))


def _drop(kind: Any, name: str, *arguments: str) -> None:
    """Let a method accept and ignore arguments that no longer exist."""

    def change(own: Any) -> Any:
        def without(self: Any, *args: Any, **kwargs: Any) -> Any:
            return own(self, *args, **{k: v for k, v in kwargs.items() if k not in arguments})

        return without

    _replace(kind, name, change)


class _Variables(list[Any]):
    """A list that can be called, because ``variables`` was a method in Keras 2."""

    def __call__(self) -> _Variables:
        return self


def _extend_optimizers(keras: Any) -> None:
    base = keras.optimizers.Optimizer
    for kind in (base, keras.optimizers.LossScaleOptimizer):
        owner = _owner(kind, "variables")
        read = vars(owner)["variables"].fget
        if not hasattr(read, _MARK):
            owner.variables = property(_callable(read))
    owner = _owner(base, "learning_rate")
    owner.lr = property(_rate, lambda optimizer, rate: setattr(optimizer, "learning_rate", rate))
    _replace(base, "__init__", _with_lr_and_decay)
    _replace(base, "_get_current_learning_rate", _decayed)
    of_keras2 = ("name", "experimental_aggregate_gradients", "skip_gradients_aggregation")
    _drop(base, "apply_gradients", *of_keras2)
    _add(owner, "get_weights", lambda optimizer: [v.numpy() for v in optimizer.variables])
    _add(owner, "set_weights", _set_weights)
    if keras.backend.backend() == "tensorflow":
        _add(owner, "minimize", _minimize)
    for place in ("keras", "keras._tf_keras.keras"):
        legacy = importlib.import_module(f"{place}.optimizers.legacy")
        for name in [n for n in vars(legacy) if hasattr(keras.optimizers, n)]:
            if not name.startswith("_"):
                setattr(legacy, name, getattr(keras.optimizers, name))


def _callable(read: Any) -> Any:
    def variables(optimizer: Any) -> _Variables:
        return _Variables(read(optimizer))

    setattr(variables, _MARK, True)
    return variables


def _with_lr_and_decay(own: Any) -> Any:
    def init(optimizer: Any, learning_rate: Any, *args: Any, **kwargs: Any) -> None:
        rate = kwargs.pop("lr", learning_rate)
        decay = kwargs.pop("decay", None)
        own(optimizer, rate, *args, **kwargs)
        if decay:  # Keras 3 would ignore it
            optimizer._keras2_decay = float(decay)

    return init


def _rate(optimizer: Any) -> Any:
    """Return the learning rate without the decay; as a variable if it is one."""
    decays = hasattr(optimizer, "_keras2_decay")
    return optimizer._learning_rate if decays else optimizer.learning_rate


def _decayed(own: Any) -> Any:
    def current(optimizer: Any) -> Any:
        rate, decay = own(optimizer), getattr(optimizer, "_keras2_decay", 0.0)
        if not decay:
            return rate
        from keras import ops

        return rate / (1.0 + decay * ops.cast(optimizer.iterations, "float32"))

    return current


def _set_weights(optimizer: Any, weights: Any) -> None:
    for variable, value in zip(optimizer.variables, weights, strict=True):
        variable.assign(value)


def _minimize(
    optimizer: Any,
    loss: Any,
    var_list: Any,
    grad_loss: Any = None,
    name: str | None = None,
    tape: Any = None,
) -> Any:
    """Do one step; ``loss`` is a function, or a value recorded by the given tape."""
    import tensorflow as tf

    if tape is None:
        with tf.GradientTape() as tape:
            value = loss()
    else:
        value = loss() if callable(loss) else loss
    variables = var_list() if callable(var_list) and not isinstance(var_list, list) else var_list
    gradients = tape.gradient(value, list(variables), grad_loss)
    return optimizer.apply_gradients(zip(gradients, variables, strict=True))


_LOADERS = ("max_queue_size", "workers", "use_multiprocessing")
# What followed the generator in Keras 2.
_OF_FIT = ("steps_per_epoch", "epochs", "verbose", "callbacks", "validation_data")
_OF_FIT += ("validation_steps", "validation_freq", "class_weight", *_LOADERS)
_OF_FIT += ("shuffle", "initial_epoch")
_OF_OTHERS = ("steps", "callbacks", *_LOADERS, "verbose")


def _extend_models(keras: Any) -> None:
    model = keras.Model
    _drop(model, "compile", "experimental_run_tf_function")
    for name in ("fit", "evaluate", "predict"):
        _drop(model, name, *_LOADERS)
    _add(model, "fit_generator", _over_generator("fit", _OF_FIT, verbose=1))
    for name in ("evaluate", "predict"):
        _add(model, f"{name}_generator", _over_generator(name, _OF_OTHERS, verbose=0))
    _add(model, "reset_states", _reset_states)
    _replace(model, "save_weights", _also_hdf5)


def _over_generator(name: str, parameters: Sequence[str], verbose: int) -> Callable[..., Any]:
    """Return a method such as ``fit_generator``; Keras 2 has these parameters, in this order."""

    def method(model: Any, generator: Any, *args: Any, **options: Any) -> Any:
        given = dict(zip(parameters[: len(args)], args, strict=True))
        given = {"verbose": verbose, **given, **options}
        kept = {key: value for key, value in given.items() if key not in _LOADERS}
        return getattr(model, name)(generator, **kept)

    return method


def _reset_states(model: Any) -> None:
    for layer in model._flatten_layers(include_self=False):
        if hasattr(layer, "reset_state") and getattr(layer, "stateful", False):
            layer.reset_state()


def _is_old_hdf5(path: Any) -> bool:
    return str(path).endswith((".h5", ".hdf5")) and not str(path).endswith(".weights.h5")


def _also_hdf5(own: Any) -> Any:
    def save_weights(model: Any, filepath: Any, overwrite: bool = True, **options: Any) -> None:
        if not _is_old_hdf5(filepath):
            own(model, filepath, overwrite=overwrite, **options)
            return
        import h5py
        from keras.src.legacy.saving import legacy_h5_format

        # load_weights() of Keras 3 can read this format.
        with h5py.File(filepath, "w" if overwrite else "x") as file:
            legacy_h5_format.save_weights_to_hdf5_group(file, model)

    return save_weights


def _extend_checkpoints(keras: Any) -> None:
    def change(own: Any) -> Any:
        def init(
            self: Any, filepath: Any, *args: Any, period: int | None = None, **kwargs: Any
        ) -> None:
            if period not in (None, 1):
                raise UsageError(
                    f"ModelCheckpoint(period={period}): Keras 3 has no period; save every "
                    "epoch, or pass save_freq=<number of batches in that many epochs>"
                )
            weights_only = kwargs.get("save_weights_only", args[3] if len(args) > 3 else False)
            if weights_only and _is_old_hdf5(filepath):
                own(self, f"{filepath}.weights.h5", *args, **kwargs)
                self.filepath = str(filepath)
            else:
                own(self, filepath, *args, **kwargs)

        return init

    _replace(keras.callbacks.ModelCheckpoint, "__init__", change)


def _extend_backend(keras: Any) -> None:
    for place in ("keras.backend", "keras._tf_keras.keras.backend"):
        module: Any = importlib.import_module(place)
        module.get_value = keras.ops.convert_to_numpy
        module.set_value = lambda variable, value: variable.assign(value)
        module.set_session = _set_session


def _set_session(session: Any) -> None:
    if launched_rank() == 0:
        report(
            "notice: set_session() has no effect in Keras 3, which has no sessions. "
            "To pin GPUs: tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU')"
        )


class _Gone(UsageError, AttributeError):
    """A removed feature."""


class _Layers:
    def __getattr__(self, name: str) -> Any:
        raise _Gone(
            f"tf.layers.{name}: Keras 3 has no tf.layers. Use tf.compat.v1.get_variable and tf.nn, "
            "or Keras 2: pip install tf-keras and set TF_USE_LEGACY_KERAS=1"
        )


def _explain_layers() -> None:
    if "tensorflow" in sys.modules:
        # Two modules: one is an attribute of `tensorflow`, the other is imported by its name.
        for name in ("tensorflow._api.v2.compat.v1", "tensorflow.compat.v1"):
            importlib.import_module(name).layers = _Layers()  # type: ignore[attr-defined]
