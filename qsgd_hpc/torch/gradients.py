"""Submission of each gradient to the engine as soon as the backward pass has computed it."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch._compile import _disable_dynamo

from qsgd_hpc import env
from qsgd_hpc.compression import Lossy
from qsgd_hpc.errors import NonFiniteGradientError, UsageError
from qsgd_hpc.frameworks.grouping import BATCH_BYTES, checked_passes, partition, wait_for_all
from qsgd_hpc.frameworks.reduction import GradientReduction, gradient_prefix
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.feedback import Ownership, forget_ownerless
from qsgd_hpc.runtime.ops import Group, Handle
from qsgd_hpc.torch.ops import sparse_allreduce_async
from qsgd_hpc.torch.ops._tensors import used_here
from qsgd_hpc.torch.parameters import Claim, name_parameters, parameters_of
from qsgd_hpc.torch.prepared import GradientAllreduce, ParameterGradient

__all__ = ["GradientReducer"]

_CHANGE_LATER = (
    "call optimizer.synchronize() before changing gradients, as to clip them, and step() within "
    "'with optimizer.skip_synchronize():'"
)
_HOOKS_LEFT: list[Any] = []
"""The hooks of optimizers that were deleted."""


class GradientReducer(Claim):
    """The reductions of the gradients of an optimizer's parameters over the ranks.

    Parameters that are unfrozen later are added at the next ``finish``.

    Args:
        optimizer: the optimizer; its groups are checked again at every step.
        named_parameters: names for messages; None numbers the parameters.
        reduction: the reduction of a gradient.
        passes: number of backward passes per reduction.
        groups: number of groups of gradients to reduce together, or the groups.
        prefix: prefix of the operations' names, equal on every rank; None creates one.
    Raises:
        UsageError: names are duplicated or missing, or groups do not match.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        reduction: GradientReduction,
        *,
        passes: int = 1,
        groups: int | Sequence[Sequence[torch.Tensor]] = 0,
        prefix: str | None = None,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._reduction = reduction
        owned = self._owned()
        self.names = name_parameters(owned, named_parameters)
        self.groups = partition(owned, groups)
        self._gradients: dict[int, ParameterGradient] = {}  # of hooked parameters, by their ids
        self._hooks: list[Any] = []
        self.residuals = Ownership()
        self.passes = checked_passes(passes)
        """Number of backward passes whose gradients are accumulated before one reduction."""
        self._batch: list[ParameterGradient] = []  # complete gradients that wait for others
        self._batch_bytes = 0
        self._handles: dict[ParameterGradient, Any] = {}  # of the reductions of this step
        self.prefix = prefix or gradient_prefix(reduction.process_set)
        self._joins = basics.joins()
        self._job = weakref.ref(basics.context())
        self.fresh = False
        """Whether a backward pass has completed a gradient since ``finish``."""
        super().__init__(optimizer)
        self.adopt()
        self._regroup()
        forget_ownerless()
        while _HOOKS_LEFT:
            _HOOKS_LEFT.pop().remove()

    def _drop(self) -> None:
        super()._drop()
        # The garbage collector may call this at any time, so the next optimizer does the rest.
        self.residuals.end()
        _HOOKS_LEFT.extend(self._hooks)

    def _owned(self) -> list[torch.Tensor]:
        return parameters_of(self._optimizer())

    def adopt(self) -> None:
        """Claim every parameter, and hook those that require a gradient and have no hook yet."""
        self.claim(self._owned())
        if self._reduction.alone:
            return  # nothing to average, so avoid the cost of hooks
        for parameter in self._owned():
            if parameter.requires_grad and id(parameter) not in self._gradients:
                self._hook(parameter)

    def _hook(self, parameter: torch.Tensor) -> None:
        name = self.names.setdefault(parameter, f"added.{len(self.names)}")
        self._gradients[id(parameter)] = ParameterGradient(parameter, name)
        if isinstance(self._reduction.compression, Lossy):
            self.residuals.names.add(self.prefix + name)
        register: Any = parameter.register_post_accumulate_grad_hook
        # Weak: a parameter must not keep an optimizer alive that the script has dropped.
        self._hooks.append(register(functools.partial(self.on_gradient, weakref.ref(self))))

    def _hooked(self, parameters: Iterable[torch.Tensor]) -> list[ParameterGradient]:
        """Return the state of the parameters that currently require a gradient."""
        hooked = ((self._gradients.get(id(p)), p) for p in parameters)
        return [each for each, p in hooked if each is not None and p.requires_grad]

    def _regroup(self) -> None:
        """Determine the groups, between steps: within one, ranks would use different groups."""
        for each in self._gradients.values():
            each.group = None
        for group in map(self._hooked, self.groups):
            for each in group:
                each.group = group

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes per reduction, from the next step on.

        Raises:
            UsageError: less than 1, or a step is in progress.
        """
        checked_passes(passes)
        if self.begun:
            raise UsageError(
                "set_backward_passes_per_step() between backward() and step(); call it after step()"
            )
        self.passes = passes

    @staticmethod
    def on_gradient(reducer: weakref.ref[GradientReducer], parameter: torch.Tensor) -> None:
        """Handle a gradient that a backward pass has computed: the hook of every parameter.

        Raises:
            UsageError: more backward passes since the last step than declared.
        """
        self = reducer()
        if self is None or self.dropped:
            return
        self.forget_ended_job()
        self.fresh = True
        if self.is_shared(parameter):
            return
        each = self._gradients[id(parameter)]
        before, gradient = each.latest, each.read()
        # After model.zero_grad(), a gradient is a new tensor without those of earlier passes. After
        # the last pass, its reduction may have started, so it can no longer be discarded.
        restarted = gradient is not before and each.passes < self.passes
        passes = 1 if restarted else each.passes + 1
        if passes > self.passes:
            raise UsageError(
                f"a gradient was computed {passes} times since the last step(), but "
                f"backward_passes_per_step is {self.passes}; call optimizer.step() (or "
                "synchronize()) in between, or pass the number of passes to DistributedOptimizer. "
                "If backward() was called once, a layer is used more than once under "
                "torch.utils.checkpoint: pass use_reentrant=False to checkpoint()"
            )
        each.passes = passes
        if passes < self.passes:
            return
        if each.group is None:
            self._batch.append(each)
            self._batch_bytes += BATCH_BYTES if self._is_sent_sparse(gradient) else each.nbytes
            if self._batch_bytes >= BATCH_BYTES:
                self._start(self._batch, together=False)
                self._batch.clear()
                self._batch_bytes = 0
        elif all(member.passes == self.passes for member in each.group):
            self._start(each.group, together=True)

    def _is_sent_sparse(self, gradient: torch.Tensor) -> bool:
        return gradient.is_sparse and not self._reduction.sparse_as_dense

    def _start(self, members: Sequence[ParameterGradient], *, together: bool) -> None:
        """Start reducing gradients, as a group or separately."""
        if together and len(members) > 1:
            dense = [each for each in members if not self._is_sent_sparse(each.gradient)]
            group = None
            if len(dense) > 1:
                group = Group(f"{self.prefix}group.{dense[0].name}", len(dense))
            self._handles |= {each: self._start_one(each, group) for each in members}
            return
        batch = {}
        for each in members:
            gradient = each.gradient
            allreduce = each.allreduce
            operation = allreduce and allreduce.operation_on(gradient, each.device_index)
            if not allreduce or not operation:  # not prepared yet, or the gradient needs conversion
                self._handles[each] = self._start_one(each, None)
            else:
                pointer, device = gradient.data_ptr(), allreduce.device
                batch[each] = operation, pointer, pointer, gradient, device, each.stream
        handles = basics.context().engine.start_all(list(batch.values()))
        self._handles.update(zip(batch, handles, strict=True))

    def _start_one(self, each: ParameterGradient, group: Group | None) -> Any:
        gradient = each.gradient
        with each.in_its_stream():
            if self._is_sent_sparse(gradient):
                return self._start_sparse(each, gradient)
            if not gradient.is_sparse:
                return self._start_dense(each, gradient, group)
            dense = gradient.to_dense()
            core = self._start_dense(each, dense, group)
        # Some optimizers accept only sparse gradients.
        dims = gradient.sparse_dim()
        return Handle([core], lambda: each.replace(gradient, used_here(dense).to_sparse(dims)))

    def _start_dense(
        self, each: ParameterGradient, gradient: torch.Tensor, group: Group | None
    ) -> Any:
        if each.allreduce is None or not each.allreduce.fits(gradient):
            each.allreduce = GradientAllreduce(
                self.prefix + each.name, each.name, gradient.shape, gradient.dtype, self._reduction
            )
        return each.allreduce.start(gradient, group)

    def _start_sparse(self, each: ParameterGradient, gradient: torch.Tensor) -> Handle:
        def replace(reduced: torch.Tensor) -> None:
            each.replace(gradient, reduced)
            _refuse_nonfinite(reduced, each.name)

        # Uncompressed: there are few entries, and their indices must be sent in any case.
        reduction = self._reduction
        handle = sparse_allreduce_async(
            gradient, self.prefix + each.name, reduction.op, reduction.process_set
        )
        return handle.then(replace)

    @_disable_dynamo  # the wrapped optimizer's step may be compiled
    def finish(self) -> NonFiniteGradientError | None:
        """Wait until every gradient is reduced.

        Returns:
            The error about a gradient with NaN or Inf, if any: it is equal on every
            rank, and so are the gradients.
        Raises:
            UsageError: a gradient was replaced or changed after its backward pass.
            HorovodInternalError: a reduction failed.
        """
        self.forget_ended_job()
        self.residuals.use()
        self.adopt()
        # While a gradient is being averaged, each rank would change it at another time.
        changed = [e for e in self._gradients.values() if e.changed and e.passes == self.passes]
        try:
            nonfinite = self._complete(self._hooked(self._owned()))
            for each in changed:
                raise UsageError(
                    f"the gradient of {_called(each.name)} was changed between backward() and "
                    f"step(), so its average is wrong; {_CHANGE_LATER}"
                )
            for each in self._gradients.values():
                if each.latest is not None and each.parameter.grad is not each.latest:
                    raise UsageError(
                        f"the gradient of {_called(each.name)} was replaced between backward() and "
                        f"step(), so its average is lost; {_CHANGE_LATER}"
                    )
        finally:
            self.discard()
            self._regroup()
        return nonfinite

    def _complete(self, taking_part: Sequence[ParameterGradient]) -> NonFiniteGradientError | None:
        """Start the reductions that no backward pass has started, then wait for all.

        Other ranks may have gradients that this rank lacks, as of an unused branch of the model, so
        it takes part in their reductions, with zeros.

        Args:
            taking_part: in an order that is equal on every rank.
        Returns:
            The first error about NaN or Inf, equal on every rank, or None.
        """
        if not self._reduction.alone:
            taking_part = self._with_layout(taking_part)
        known = set(taking_part)
        if self._batch:
            self._start(self._batch, together=False)
        for each in taking_part:
            if each in self._handles:
                continue
            group = each.group or (each,)
            members = [e for e in group if e in known and e not in self._handles]
            for member in members:
                member.complete()
            self._start(members, together=True)
        return wait_for_all(self._handles.values())

    def _with_layout(self, gradients: Sequence[ParameterGradient]) -> Sequence[ParameterGradient]:
        """Return those that some rank has had in this or an earlier step; equal on every rank.

        A rank without a gradient for a parameter contributes an empty (sparse) or a zero (dense)
        one, so it needs the layout from the others. Therefore the ranks compare layouts at the end
        of each step until every parameter has had a gradient on some rank: usually once. Until
        then, the parameter is not reduced, and keeps no gradient, as in one process. A rank that
        has joined misses comparisons, so all ranks start again after a join.

        Args:
            gradients: those of this step, of equal parameters on every rank.
        """
        if self._joins != basics.joins():
            self._joins = basics.joins()
            for each in self._gradients.values():
                each.sparse_dim = None
        unknown = [each for each in gradients if each.sparse_dim is None]
        if not unknown:
            return gradients
        for each in unknown:
            if each.passes < self.passes:
                # The script may have discarded it; a reduction that has started needs every rank.
                each.latest = each.parameter.grad
        seen = np.array([_layout(each.latest) for each in unknown], np.int64)
        # By a sum, to which a joined rank can contribute zeros.
        name, process_set = f"layouts.{self.prefix}", self._reduction.process_set
        ops.reduce_array(seen, name, ops.Sum, process_set=process_set, lasting=False)
        for each, (dense, sparse, dims) in zip(unknown, seen.tolist(), strict=True):
            each.sparse_dim = dims // sparse if sparse else 0 if dense else None
        return [each for each in gradients if each.sparse_dim is not None]

    @property
    def begun(self) -> bool:
        """Whether a backward pass has completed a gradient since the last step.

        Unlike ``busy``, equal on all ranks that have a gradient.
        """
        return any(each.passes for each in self._gradients.values())

    def complete_pending(self) -> None:
        """Reduce the gradients of a step that has begun, before another optimizer uses them."""
        self.forget_ended_job()
        try:
            if self.begun:
                self._complete(self._hooked(each.parameter for each in self._gradients.values()))
        finally:
            self.discard()

    def discard(self) -> None:
        """Discard the gradients of a step that has ended or is cancelled."""
        self._handles.clear()
        self._batch.clear()
        self._batch_bytes = 0
        for each in self._gradients.values():
            each.latest = None
            each.passes = 0
        self.fresh = False

    def forget_ended_job(self) -> None:
        """If the job was shut down, drop the operations that were in flight then."""
        if self._job() is not basics.context():
            self._job = weakref.ref(basics.context())
            for each in self._gradients.values():
                each.allreduce = None
            self.discard()

    @property
    def busy(self) -> bool:
        """Whether a gradient is ready or in flight and has not been waited for."""
        self.forget_ended_job()
        return bool(self._handles or self._batch)


def _called(name: str) -> str:
    """Return a parameter's name for messages; it is a number without ``named_parameters``."""
    return f"parameter {name}, counted from 0," if name.isdecimal() else repr(name)


def _layout(gradient: torch.Tensor | None) -> tuple[int, int, int]:
    """Return whether a gradient is dense, whether it is sparse, and its sparse dimensions."""
    if gradient is None:
        return 0, 0, 0
    return (0, 1, gradient.sparse_dim()) if gradient.is_sparse else (1, 0, 0)


def _refuse_nonfinite(gradient: torch.Tensor, name: str) -> None:
    """Apply QSGD_NONFINITE to a gradient with NaN or Inf, on every rank.

    Raises:
        NonFiniteGradientError: unless QSGD_NONFINITE allows such gradients.
    """
    what = env.get("QSGD_NONFINITE")
    if what == "propagate" or gradient.values().isfinite().all():
        return
    fault = (
        f"the sparse gradient of {name!r} holds NaN or Inf after all ranks' entries were added. "
        "Lower the learning rate or scale the loss; QSGD_NONFINITE"
    )
    if what == "error":
        raise NonFiniteGradientError(f"{fault}=warn or =propagate lets training go on")
    if basics.rank() == 0:
        warnings.warn(f"{fault}=error would end the training", stacklevel=2)  # shown once
