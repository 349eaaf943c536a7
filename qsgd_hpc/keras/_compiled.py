"""Patches to Keras's classes for distributed optimizers, applied once per process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import keras

from qsgd_hpc.keras._backend import BACKEND
from qsgd_hpc.keras._replicas import name_of
from qsgd_hpc.keras._synchronized import Synchronization, Synchronized

__all__ = [
    "build_optimizers_before_tracing",
    "exclude_steps_from_xla",
    "keep_copies_distributed",
    "make_loss_scalers_agree",
    "synchronizations",
]

_MARK = "_qsgd_hpc"


def make_loss_scalers_agree() -> None:
    """Make loss scalers skip a step if any rank's gradients overflow; idempotent.

    Their variables have the same names, whether a step builds them or ``build``, as after loading.
    ``compile`` creates the scaler of a ``mixed_float16`` model, so its class is patched.
    """
    kind = keras.optimizers.LossScaleOptimizer
    if hasattr(kind.check_finite, _MARK):
        return
    own: Callable[..., Any] = kind.check_finite

    @BACKEND.uncompiled
    @functools.wraps(own)
    def check_finite(scaler: Any, grads: Any) -> Any:
        finite = own(scaler, grads)
        found = [each for each in synchronizations(scaler) if not each.reduction.alone]
        if not found:
            return finite
        for each in found:
            each.used = True
            each.scaler_state = scaler._variables
        # Two scalers of one step may ask at the same time.
        names = [name_of(v) for v in scaler.inner_optimizer._trainable_variables[:1]]
        return BACKEND.all_ranks_agree(finite, ".".join(["finite", *names]), found[0].reduction)

    setattr(check_finite, _MARK, True)
    kind.check_finite = check_finite
    own_build: Callable[..., Any] = kind.build

    @functools.wraps(own_build)
    def build(scaler: Any, variables: Any) -> None:
        # In the scope of a build by apply: the names must be those of ranks that built before.
        with BACKEND.outside_of_graphs(), keras.name_scope(scaler.name, caller=scaler):
            own_build(scaler, variables)

    kind.build = build


def synchronizations(optimizer: Any) -> list[Synchronization]:
    """Return the synchronizations of an optimizer and of the members of a ``MultiOptimizer``."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # The members that a function chooses are known only after build.
    parts = [inner, *getattr(inner, "optimizers", ())]
    return [each._synchronization for each in parts if isinstance(each, Synchronized)]


def exclude_steps_from_xla() -> None:
    """Prevent Keras from compiling distributed steps with XLA, which cannot call the engine.

    Keras compiles a model's steps on GPUs automatically, so this cannot be left to the user.
    """
    trainer = sys.modules[keras.Model.compile.__module__]
    own: Callable[..., Any] | None = getattr(trainer, "model_supports_jit", None)
    if keras.backend.backend() != "tensorflow" or own is None or hasattr(own, _MARK):
        return
    supports = own

    @functools.wraps(supports)
    def model_supports_jit(model: Any) -> bool:
        return not synchronizations(getattr(model, "optimizer", None)) and bool(supports(model))

    setattr(model_supports_jit, _MARK, True)
    trainer.model_supports_jit = model_supports_jit  # type: ignore[attr-defined]


def build_optimizers_before_tracing() -> None:
    """Make ``fit`` create the variables of a distributed optimizer before it traces a step.

    TensorFlow traces a step twice if the first time creates variables, and the operations of the
    second trace get other names: other ones than on a rank that has loaded its optimizer, and
    than those of the residuals in a checkpoint.
    """
    own: Callable[..., Any] = keras.Model.make_train_function
    if keras.backend.backend() != "tensorflow" or hasattr(own, _MARK):
        return

    @functools.wraps(own)
    def make_train_function(model: Any, *args: Any, **options: Any) -> Any:
        optimizer: Any = getattr(model, "optimizer", None)
        complete = model.built and all(layer.built for layer in model._flatten_layers())
        if complete and synchronizations(optimizer) and not optimizer.built:
            optimizer.build(model.trainable_variables)
        return own(model, *args, **options)

    setattr(make_train_function, _MARK, True)
    keras.Model.make_train_function = make_train_function  # type: ignore[method-assign]


def keep_copies_distributed(copied: Callable[[Any], tuple[Any, Any] | None]) -> None:
    """Make pickles and deep copies of models and optimizers contain the synchronisation.

    Keras copies only what it saves in a file, which lacks the synchronisation: a model from
    ``broadcast_object`` would then train separately on some ranks while the root waits for them.

    Args:
        copied: returns, for an object, a function and its second argument: the function converts
            Keras's copy to the final copy. None: Keras's copy is used.
    """
    kind = next(each for each in keras.Model.__mro__ if "__reduce__" in vars(each))
    if hasattr(kind.__reduce__, _MARK):
        return
    own: Callable[..., Any] = kind.__reduce__

    @functools.wraps(own)
    def __reduce__(saveable: Any) -> Any:
        found = copied(saveable)
        _, arguments = own(saveable)
        # Not a method of the object's class, which pickle cannot find for a distributed optimizer.
        plain = (kind._unpickle_model, arguments)
        return plain if found is None else (_load_and_convert, (*plain, *found))

    setattr(__reduce__, _MARK, True)
    kind.__reduce__ = __reduce__  # type: ignore[method-assign]


def _load_and_convert(load: Any, arguments: Any, function: Any, options: Any) -> Any:
    return function(load(*arguments), options)
