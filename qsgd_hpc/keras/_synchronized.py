"""Equal variables on all ranks: methods added to a distributed optimizer, and patches to Keras."""

from __future__ import annotations

import functools
import hashlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from numpy.typing import NDArray

from qsgd_hpc import arrays
from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.reduction import GradientReduction
from qsgd_hpc.frameworks.step_mark import marks_steps
from qsgd_hpc.keras._backend import BACKEND
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from keras.optimizers import Optimizer
else:
    Optimizer = object  # at run time, each optimizer's own class is the next base class

__all__ = [
    "Synchronization", "Synchronized", "SynchronizedFirst", "SynchronizedInStep",
    "broadcast_values", "is_local", "name_of", "patch", "patch_keras", "synchronizations",
    "unequal", "value_of",
]  # fmt: skip

REMEDY = (
    "Either gradients bypass the DistributedOptimizer (a train_step that changes variables by "
    "itself), or a callback has changed weights or the learning rate on some ranks only, or the "
    "ranks began with unequal values: pass hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit"
)


def name_of(variable: Any) -> str:
    """Return the name of a variable, equal on every rank."""
    return str(getattr(variable, "path", None) or variable.name)


def is_local(variable: Any, local: Iterable[str]) -> bool:
    """Return whether a variable is local, or an optimizer's state for a local variable.

    Args:
        variable: a variable of a model or an optimizer.
        local: names of the model's local variables.
    """
    name = name_of(variable)
    # Keras names the state "adam/dense_kernel_momentum" for the variable "dense/kernel".
    last = name.rpartition("/")[2]
    return any(name == each or last.startswith(each.replace("/", "_") + "_") for each in local)


def value_of(variable: Any) -> NDArray[Any]:
    """Return a copy of a variable's value."""
    native = variable.value if isinstance(variable, keras.Variable) else variable
    return np.array(keras.ops.convert_to_numpy(native), order="C")


def broadcast_values(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Set variables to their values on root_rank; shapes must be equal.

    Raises:
        UsageError: the ranks have other variables; on every rank.
    """
    with BACKEND.outside_of_graphs():
        _require_equal_names([name_of(v) for v in variables], process_set)
        values = [value_of(v) for v in variables]
        handles = [
            arrays.broadcast_async_(value, root_rank, f"variable.{i}.{name_of(v)}", process_set)
            for i, (v, value) in enumerate(zip(variables, values, strict=True))
        ]
        for variable, handle in zip(variables, handles, strict=True):
            variable.assign(handle.wait())


def unequal(mine: Any, process_set: ProcessSet, doing: str) -> Iterator[tuple[int, Any, int, Any]]:
    """Compare a value over the ranks of the set; collective.

    Args:
        mine: this rank's value, which can be pickled.
        process_set: the ranks.
        doing: what this rank does, for the error if another rank compares a value elsewhere.
    Yields:
        For each rank whose value is another than the first rank's: the rank and its value, the
        first rank and its value.
    Raises:
        UsageError: the ranks are at different places of the script; on every rank.
    """
    everyone = arrays.allgather_object((doing, mine), process_set=process_set)
    ranks = process_set.ranks or []
    place, first = everyone[0]
    for rank, (other_place, _) in zip(ranks, everyone, strict=True):
        if other_place != place:
            raise UsageError(
                f"rank {rank} {other_place} while rank {ranks[0]} {place}. Every rank needs the "
                "same number of epochs and the callbacks of qsgd_hpc; EarlyStopping stops all "
                "ranks alike after hvd.callbacks.MetricAverageCallback()"
            )
    for rank, (_, theirs) in zip(ranks, everyone, strict=True):
        if theirs != first:
            yield rank, theirs, ranks[0], first


def _require_equal_names(names: list[str], process_set: ProcessSet) -> None:
    for rank, theirs, first_rank, first in unequal(names, process_set, "broadcasts"):
        pairs = zip(theirs, first, strict=False)
        here, there = next((p for p in pairs if p[0] != p[1]), (len(theirs), len(first)))
        what = "name of a variable" if isinstance(here, str) else "number of variables"
        raise UsageError(
            f"the {what} to broadcast is {here!r} on rank {rank} and {there!r} on rank "
            f"{first_rank}. Create the model and its optimizer in the same way on every rank. To "
            "continue from a file, load it on every rank: Keras may name a loaded model's "
            "variables differently"
        )


def _require_equal(variables: Sequence[Any], process_set: ProcessSet) -> None:
    """Check that variables are the same on every rank of the set, bit for bit; collective.

    Raises:
        UsageError: on every rank; it names a variable and a rank.
    """
    mine = [(name_of(v), _digest(v)) for v in variables]
    for rank, theirs, first_rank, first in unequal(mine, process_set, "ends fit"):
        pairs = zip(theirs, first, strict=False)
        names = [name for (name, digest), (_, expected) in pairs if digest != expected]
        what = f"variable {names[0]!r}" if names else "the number of variables"
        raise UsageError(
            f"after training, {what} of rank {rank} differs from that of rank {first_rank} "
            f"({len(names)} of {len(mine)} variables do). {REMEDY}"
        )


def _digest(variable: Any) -> bytes:
    return hashlib.blake2b(value_of(variable).tobytes(), digest_size=16).digest()


_MARK = "_qsgd_hpc"


class Synchronization:
    """The synchronisation of one optimizer's variables over the ranks.

    Args:
        reduction: the reduction of the gradients.
        groups: number of groups of gradients to reduce together, or the groups.
        local: names of the variables whose gradients stay on this rank.
        local_factor: multiplies these gradients.
        factor: multiplies reduced gradients.
    """

    def __init__(
        self,
        reduction: GradientReduction,
        groups: Any = 0,
        local: Iterable[str] = (),
        local_factor: float = 1.0,
        factor: float = 1.0,
    ) -> None:
        self.reduction = reduction
        self.variables: Sequence[Any] = ()
        """The variables of the next gradients."""
        self.begun = False
        """Whether the ranks have equal values."""
        self.steps = 0
        """Number of reductions; with compiled steps, the number of compilations."""
        self.used = False
        """Whether gradients were passed to the optimizer: not all of them lead to a reduction."""
        self.scaler_state: Sequence[Any] = ()
        """The loss scaler's own variables."""
        self._groups = groups
        self._reducer = BACKEND.reducer(reduction, groups)
        self._local = set(local)
        self._local_factor = local_factor
        self._factor = factor

    def copy_arguments(self) -> tuple[Any, ...]:
        """Return picklable arguments of :meth:`restored` that create a copy of this object.

        Raises:
            UsageError: this object refers to variables, which differ in a copy.
        """
        if not isinstance(self._groups, int):
            raise UsageError(
                "an optimizer with groups of variables cannot be copied: pass the number of groups "
                "(DistributedOptimizer(groups=4)), or copy the optimizer that it wraps"
            )
        local = sorted(self._local)
        options = (self.reduction, self._groups, local, self._local_factor, self._factor)
        return (self.begun, *options)

    @classmethod
    def restored(cls, begun: bool, *options: Any) -> Synchronization:
        """Return a copy from :meth:`copy_arguments`."""
        made = cls(*options)
        made.begun = begun
        return made

    def add_local(self, variable: Any) -> None:
        """Exclude a variable's gradients from the reduction."""
        self._local.add(name_of(variable))

    def shared(self, variables: Iterable[Any]) -> list[Any]:
        """Return the variables, of the model or the optimizer, that are equal on all ranks."""
        return [v for v in variables if not is_local(v, self._local)]

    def begin(self, variables: Sequence[Any], state: Sequence[Any]) -> None:
        """Before the first step: broadcast the values of one rank; collective.

        Args:
            variables: the model's variables, which the optimizer changes.
            state: the optimizer's variables, and those of its loss scaler.
        """
        if self.begun or self.reduction.alone or not BACKEND.eager_values:
            return
        self.begun = True
        process_set = self.reduction.process_set
        # A model that is not built before fit has no values yet, but some ranks may have loaded it.
        if all(arrays.allgather_object(BACKEND.have_values(variables), process_set=process_set)):
            root = (process_set.ranks or [0])[0]
            own = state if BACKEND.have_values(state) else ()
            broadcast_values(self.shared([*variables, *own]), root, process_set)

    def complete(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients, with zeros for those that only this rank lacks."""
        if self.reduction.alone:
            return list(gradients)
        return BACKEND.complete(gradients, variables)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients, reduced over the ranks and scaled."""
        self.steps += 1
        if self.reduction.alone:
            if marks_steps():
                gradients = self._reducer(gradients, variables)
            return [_times(gradient, self._factor) for gradient in gradients]
        reduced = list(gradients)
        places = [i for i, v in enumerate(variables) if name_of(v) not in self._local]
        results = self._reducer([gradients[i] for i in places], [variables[i] for i in places])
        for i, result in zip(places, results, strict=True):
            reduced[i] = _times(result, self._factor)
        for i in set(range(len(reduced))) - set(places):
            reduced[i] = _times(reduced[i], self._local_factor)
        return reduced

    def end(self, variables: Sequence[Any]) -> None:
        """After training: check that the replicas are equal; collective.

        Raises:
            UsageError: they are not equal, or the optimizer got no gradient.
        """
        if self.reduction.alone or not variables:
            return
        if not self.used:
            raise UsageError(
                "the model was trained without its DistributedOptimizer: no gradient was reduced. "
                "Let train_step call self.optimizer.apply (or apply_gradients), or reduce the "
                "gradients there and compile the model with the optimizer itself"
            )
        _require_equal(self.shared(variables), self.reduction.process_set)


def _times(gradient: Any, factor: float) -> Any:
    return gradient if gradient is None or factor == 1.0 else BACKEND.scaled(gradient, factor)


def _calling_frame() -> FrameType:
    """Return the frame, usually of ``fit``, that calls ``finalize_variable_values``."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name == "finalize_variable_values":
        frame = frame.f_back
    return frame


def _has_no_epochs(frame: FrameType) -> bool:
    """Return whether ``fit`` had nothing to train, as in a job that is resumed at its end."""
    first, end = frame.f_locals.get("initial_epoch"), frame.f_locals.get("epochs")
    return isinstance(first, int) and isinstance(end, int) and first >= end


def _is_cleaning_up(frame: FrameType) -> bool:
    """Return whether ``fit`` calls this because of an exception, as it does on JAX."""
    error = sys.exc_info()[1]
    frames = [] if error is None else [at for at, _ in traceback.walk_tb(error.__traceback__)]
    return frame in frames


class Synchronized(Optimizer):
    """Base class placed before the optimizer's class."""

    _synchronization: Synchronization

    def register_local_var(self, variable: Any) -> None:
        """Do not reduce a variable's gradients; call this before the first step."""
        self._synchronization.add_local(variable)

    def _begin(self: Any, trainable_variables: Any) -> list[Any]:
        given = trainable_variables is not None
        variables = list(trainable_variables if given else self._trainable_variables)
        self._synchronization.used = True
        if given and not self.built and BACKEND.have_values(variables):
            with BACKEND.outside_of_graphs():  # as on ranks that have loaded their optimizer
                self.build(variables)
        # A loss scaler has divided the gradients by its scale already, so its state may change now.
        state = [*self.variables, *self._synchronization.scaler_state]
        self._synchronization.begin(variables, state)
        return variables

    def finalize_variable_values(self: Any, var_list: Any) -> None:
        """Finalise the optimizer's variables, then check that the replicas are equal."""
        super().finalize_variable_values(var_list)
        frame = _calling_frame()
        # In the first case, other ranks may be in the middle of a step.
        if not _is_cleaning_up(frame) and not _has_no_epochs(frame):
            self._synchronization.end(list(var_list))


class SynchronizedFirst(Synchronized):
    """Base class for optimizers with their own ``apply``, to which reduced gradients are passed."""

    @BACKEND.uncompiled  # torch.compile must not trace waiting for ranks
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Reduce the gradients over the ranks, then execute the optimizer's own step."""
        variables = self._begin(trainable_variables)
        grads = self._synchronization.complete(grads, variables)
        super().apply(self._synchronization.reduce(grads, variables), trainable_variables)


class SynchronizedInStep(Synchronized):
    """Base class for other optimizers: reduces gradients after accumulation, before clipping."""

    @BACKEND.uncompiled  # torch.compile must not trace waiting for ranks
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Reduce the gradients over the ranks within the optimizer's own step."""
        variables = self._begin(trainable_variables)
        steps = self._synchronization.steps
        super().apply(self._synchronization.complete(grads, variables), trainable_variables)
        # With accumulation, not every pass reduces gradients, so only single passes are checked.
        every_pass = not self.gradient_accumulation_steps
        if every_pass and len(grads) and self._synchronization.steps == steps:
            raise UsageError(
                f"{type(self).__name__}.apply has changed variables with gradients of this rank "
                "only: its class, or this version of Keras, clips gradients in an unsupported "
                "way. Reduce the gradients in train_step, and pass the optimizer itself to "
                "compile"
            )

    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> None:
        self._synchronization.variables = trainable_variables
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self: Any, grads: Any) -> Any:
        synchronization = self._synchronization

        def reduce(gradients: Sequence[Any]) -> Any:
            return synchronization.reduce(gradients, synchronization.variables)

        return super()._clip_gradients(BACKEND.if_updating(self, reduce, grads))


def synchronizations(optimizer: Any) -> list[Synchronization]:
    """Return the synchronizations of an optimizer and of the members of a ``MultiOptimizer``."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # The members that a function chooses are known only after build.
    parts = [inner, *getattr(inner, "optimizers", ())]
    return [each._synchronization for each in parts if isinstance(each, Synchronized)]


def patch(owner: Any, name: str, change: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace a function of Keras by ``change(function)``, once per process."""
    own = getattr(owner, name)
    if not hasattr(own, _MARK):
        changed = functools.wraps(own)(change(own))
        setattr(changed, _MARK, True)
        setattr(owner, name, changed)


def patch_keras() -> None:
    """Make loss scalers and ``fit`` respect distributed optimizers; idempotent.

    ``compile`` creates the scaler of a ``mixed_float16`` model, so its class is patched.
    """
    patch(keras.optimizers.LossScaleOptimizer, "check_finite", _agreeing)
    patch(keras.optimizers.LossScaleOptimizer, "build", _scoped)
    if keras.backend.backend() != "tensorflow":
        return
    trainer = sys.modules[keras.Model.compile.__module__]
    if hasattr(trainer, "model_supports_jit"):
        patch(trainer, "model_supports_jit", _excluding_xla)
    patch(keras.Model, "make_train_function", _building_first)


def _agreeing(own: Any) -> Any:
    """Make loss scalers skip a step if any rank's gradients overflow."""

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

    return BACKEND.uncompiled(check_finite)


def _scoped(own: Any) -> Any:
    """Make ``build`` name a scaler's variables as a step or the loading of a file does."""

    def build(scaler: Any, variables: Any) -> None:
        # In the scope of a build by apply: the names must be those of ranks that built before.
        with BACKEND.outside_of_graphs(), keras.name_scope(scaler.name, caller=scaler):
            own(scaler, variables)

    return build


def _excluding_xla(own: Any) -> Any:
    """Prevent Keras from compiling distributed steps with XLA, which cannot call the engine.

    Keras compiles a model's steps on GPUs automatically, so this cannot be left to the user.
    """

    def model_supports_jit(model: Any) -> bool:
        return not synchronizations(getattr(model, "optimizer", None)) and bool(own(model))

    return model_supports_jit


def _building_first(own: Any) -> Any:
    """Make ``fit`` create the variables of a distributed optimizer before it traces a step.

    TensorFlow traces a step twice if the first time creates variables, and the operations of the
    second trace get other names: other ones than on a rank that has loaded its optimizer, and
    than those of the residuals in a checkpoint.
    """

    def make_train_function(model: Any, *args: Any, **options: Any) -> Any:
        optimizer: Any = getattr(model, "optimizer", None)
        complete = model.built and all(layer.built for layer in model._flatten_layers())
        if complete and synchronizations(optimizer) and not optimizer.built:
            optimizer.build(model.trainable_variables)
        return own(model, *args, **options)

    return make_train_function
