"""Hands each gradient to the engine as soon as the backward pass has completed it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo

from qsgd_hpc import basics
from qsgd_hpc._base.gradient_reduction import GradientReduction, gradient_prefix
from qsgd_hpc._base.grouping import partition
from qsgd_hpc._base.pending import BATCH_BYTES, PendingGradients
from qsgd_hpc.errors import NonFiniteGradientError, UsageError
from qsgd_hpc.ops import Group, Handle
from qsgd_hpc.torch.claims import Claim
from qsgd_hpc.torch.naming import name_parameters
from qsgd_hpc.torch.prepared import GradientAllreduce
from qsgd_hpc.torch.sparse import Layouts, refuse_nonfinite, start_sparse
from qsgd_hpc.torch.step_mark import mark_step

__all__ = ["GradientReducer"]


class GradientReducer(Claim):
    """Reduces over the ranks the gradients of an optimizer's parameters.

    Parameters that are unfrozen later are taken in at the next ``finish``.

    Args:
        optimizer: whose gradients; its groups are looked at again at every step.
        named_parameters: names for messages; None numbers the parameters.
        reduction: what becomes of a gradient.
        passes: backward passes that add up before one reduction.
        groups: how many groups of gradients to reduce together, or the groups.
        prefix: of the operations' names, equal on every rank; None makes one.
    Raises:
        UsageError: names doubled or missing, or groups that do not fit.
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
        owned = list(self._owned())
        self.names = name_parameters(owned, named_parameters)
        self.groups = partition(owned, groups)
        self._prepared: dict[torch.Tensor, GradientAllreduce] = {}
        self._reduced: dict[torch.Tensor, torch.Tensor] = {}
        self._summed: dict[torch.Tensor, torch.Tensor | None] = {}  # what passes have added up in
        self._hooks: dict[torch.Tensor, Any] = {}
        self.pending = PendingGradients(
            passes=passes, start=self._start, size_bytes=self._size_bytes
        )
        self.prefix = prefix or gradient_prefix(reduction.process_set)
        self._layouts = Layouts(f"layouts.{self.prefix}", reduction)
        self._job = weakref.ref(basics.context())
        self.fresh = False
        """Whether a backward pass has completed a gradient since ``finish``."""
        super().__init__(optimizer)
        self.adopt()
        self._regroup()

    def _owned(self) -> Iterable[torch.Tensor]:
        optimizer: Any = self._optimizer()
        return (p for group in optimizer.param_groups for p in group["params"])

    @property
    def alone(self) -> bool:
        """Whether there is nobody to reduce with."""
        return self._reduction.alone

    def mark_step(self) -> None:
        """Let the engine see a step of a rank that is alone."""
        mark_step((p.grad for p in self._owned()), self.prefix)

    def adopt(self) -> None:
        """Claim every parameter, and hook those that take a gradient and are not hooked yet."""
        self.claim(self._owned())
        if self.alone:
            return  # nothing to average, and nothing to pay
        for parameter in self._owned():
            if parameter.requires_grad and parameter not in self._hooks:
                self._hook(parameter)

    def _hook(self, parameter: torch.Tensor) -> None:
        self.names.setdefault(parameter, f"added.{len(self.names)}")
        register: Any = parameter.register_post_accumulate_grad_hook
        self._hooks[parameter] = register(_hook(weakref.ref(self)))

    def _regroup(self) -> None:
        self.pending.set_groups(
            [p for p in group if p.requires_grad and p in self._hooks] for group in self.groups
        )

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Act on a gradient that a backward pass has completed."""
        if self.dropped:
            return
        self.forget_ended_job()
        self.fresh = True
        if not self.is_shared(parameter):
            self.pending.ready(parameter, anew=self._is_new(parameter))

    def _is_new(self, parameter: torch.Tensor) -> bool:
        """Tell whether a gradient adds to none of earlier passes, as after model.zero_grad()."""
        if self.pending.passes == 1:
            return False
        before = self._summed.get(parameter)
        self._summed[parameter] = parameter.grad
        return parameter.grad is not before

    def _start(self, parameters: Sequence[torch.Tensor]) -> dict[torch.Tensor, Any]:
        if len(parameters) == 1:  # the usual case, once per parameter and step
            (parameter,) = parameters
            gradient = self._taken(parameter)
            prepared = self._prepared.get(parameter)
            if prepared is None or prepared.dtype != gradient.dtype or gradient.is_sparse:
                return {parameter: self._start_one(parameter, gradient, None)}
            return {parameter: prepared.start(gradient)}
        gradients = {p: self._taken(p) for p in parameters}
        dense = [p for p, gradient in gradients.items() if not self._travels_sparse(gradient)]
        group = None
        if len(dense) > 1:
            group = Group(f"{self.prefix}group.{self.names[dense[0]]}", len(dense))
        return {p: self._start_one(p, gradient, group) for p, gradient in gradients.items()}

    def _travels_sparse(self, gradient: torch.Tensor) -> bool:
        return gradient.is_sparse and not self._reduction.sparse_as_dense

    def _size_bytes(self, parameter: torch.Tensor) -> int:
        gradient = self._gradient(parameter)
        return BATCH_BYTES if self._travels_sparse(gradient) else parameter.nbytes

    def _taken(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the gradient that was there when it became ready."""
        taken = self._reduced.get(parameter)
        return self._gradient(parameter) if taken is None else taken

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        assert gradient is not None
        self._reduced[parameter] = gradient
        return gradient

    def _start_one(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group | None
    ) -> Any:
        if self._travels_sparse(gradient):
            return self._start_sparse(parameter, gradient)
        if gradient.is_sparse:
            return self._start_densified(parameter, gradient, group)
        return self._start_dense(parameter, gradient, group)

    def _start_dense(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group | None
    ) -> Any:
        prepared = self._prepared.get(parameter)
        if prepared is None or prepared.dtype != gradient.dtype:
            name = self.names[parameter]
            prepared = self._prepared[parameter] = GradientAllreduce(
                self.prefix + name, name, gradient.shape, gradient.dtype, self._reduction
            )
        return prepared.start(gradient, group)

    def _start_densified(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group | None
    ) -> Handle:
        dense = gradient.to_dense()
        core = self._start_dense(parameter, dense, group)
        # Some optimizers take sparse gradients alone, on any number of ranks.
        dims = gradient.sparse_dim()
        return Handle([core], lambda: self._replace(parameter, gradient, dense.to_sparse(dims)))

    def _start_sparse(self, parameter: torch.Tensor, gradient: torch.Tensor) -> Handle:
        name = self.names[parameter]

        def replace(reduced: torch.Tensor) -> None:
            self._replace(parameter, gradient, reduced)
            refuse_nonfinite(reduced, name)

        return start_sparse(gradient, self.prefix + name, self._reduction).then(replace)

    def _replace(
        self, parameter: torch.Tensor, gradient: torch.Tensor, reduced: torch.Tensor
    ) -> None:
        if parameter.grad is gradient:  # else finish() complains
            parameter.grad = self._reduced[parameter] = reduced

    @_disable_dynamo  # where the wrapped optimizer's step is compiled
    def finish(self) -> NonFiniteGradientError | None:
        """Wait until every gradient is reduced.

        Returns:
            The complaint about a gradient that holds NaN or Inf, if one does: it is equal on every
            rank, and so are the gradients.
        Raises:
            UsageError: a gradient was replaced after its backward pass.
            HorovodInternalError: a reduction failed.
        """
        self.forget_ended_job()
        self.adopt()
        try:
            nonfinite = self._complete([p for p in self._owned() if p in self._hooks])
            for parameter, gradient in self._reduced.items():
                if parameter.grad is not gradient:
                    raise UsageError(
                        f"the gradient of {self.names[parameter]!r} was replaced between "
                        "backward() and step(), so its average is lost; call "
                        "optimizer.synchronize() before you change gradients"
                    )
        finally:
            self.discard()
            self._regroup()
        return nonfinite

    def _complete(self, parameters: Sequence[torch.Tensor]) -> NonFiniteGradientError | None:
        taking_part = [p for p in parameters if p.requires_grad]
        if not self.alone:
            self._layouts.compare(taking_part)
        return self.pending.finish(taking_part, self._give_gradient)

    @property
    def begun(self) -> bool:
        """Whether gradients of a step have been counted, or their reductions started."""
        return self.pending.begun

    def settle(self) -> None:
        """Reduce the gradients of a step that has begun, before another optimizer takes them."""
        self.forget_ended_job()
        try:
            if self.begun:
                self._complete(list(self._hooks))
        finally:
            self.discard()

    def discard(self) -> None:
        """Forget the gradients of a step that has ended, or that is not to be."""
        self.pending.forget()
        self._reduced.clear()
        self._summed.clear()
        self.fresh = False

    def _give_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = self._layouts.zero_gradient(parameter)

    def forget_ended_job(self) -> None:
        """Forget what was under way when the job was shut down, if it has been since."""
        if self._job() is not basics.context():
            self._job = weakref.ref(basics.context())
            self._prepared.clear()
            self.discard()

    @property
    def busy(self) -> bool:
        """Whether gradients are being reduced."""
        self.forget_ended_job()
        return self.pending.any


def _hook(reducer: weakref.ref[GradientReducer]) -> Any:
    # Weak: a parameter must not keep an optimizer alive that the script has dropped.
    def on_gradient(parameter: torch.Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive.on_gradient(parameter)

    return on_gradient
