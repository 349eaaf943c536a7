"""Hands each gradient to the engine as soon as the backward pass has completed it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo

from qsgd_hpc import basics
from qsgd_hpc._base.gradient_reduction import GradientReduction, gradient_prefix
from qsgd_hpc._base.grouping import partition
from qsgd_hpc._base.pending import BATCH_BYTES, PendingGradients
from qsgd_hpc.errors import NonFiniteGradientError, UsageError
from qsgd_hpc.ops import Group, Handle
from qsgd_hpc.torch.naming import name_parameters
from qsgd_hpc.torch.prepared import GradientAllreduce
from qsgd_hpc.torch.sparse import Layouts, refuse_nonfinite, start_sparse

__all__ = ["GradientReducer"]

_OWNER = "_qsgd_hpc_reducer"  # on a parameter: a weak reference to the reducer that has hooked it


class GradientReducer:
    """Reduces over the ranks the gradients of an optimizer's parameters.

    Parameters that are unfrozen or added later are taken in at the next ``finish``.

    Args:
        param_groups: returns the optimizer's groups, looked at again at every step.
        named_parameters: names for messages; None numbers the parameters.
        reduction: what becomes of a gradient.
        passes: backward passes that add up before one reduction.
        groups: how many groups of gradients to reduce together, or the groups.
    Raises:
        UsageError: names doubled or missing, or groups that do not fit.
    """

    def __init__(
        self,
        param_groups: Callable[[], list[dict[str, Any]]],
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        reduction: GradientReduction,
        *,
        passes: int = 1,
        groups: int | Sequence[Sequence[torch.Tensor]] = 0,
    ) -> None:
        self._param_groups = param_groups
        self._reduction = reduction
        owned = list(self._owned())
        self._names = name_parameters(owned, named_parameters)
        self._groups = partition(owned, groups)
        self._prepared: dict[torch.Tensor, GradientAllreduce] = {}
        self._reduced: dict[torch.Tensor, torch.Tensor] = {}
        self._hooks: dict[torch.Tensor, Any] = {}
        self.pending = PendingGradients(
            passes=passes, start=self._start, size_bytes=self._size_bytes
        )
        self._prefix = gradient_prefix(reduction.process_set)
        self._layouts = Layouts(f"layouts.{self._prefix}", reduction)
        self._job = weakref.ref(basics.context())
        self.fresh = False
        """Whether a backward pass has completed a gradient since ``finish``."""
        self.adopt()

    def _owned(self) -> Iterable[torch.Tensor]:
        return (p for group in self._param_groups() for p in group["params"])

    @property
    def alone(self) -> bool:
        """Whether there is nobody to reduce with."""
        return self._reduction.alone

    def adopt(self) -> None:
        """Hook every parameter that takes a gradient and is not hooked yet."""
        if self.alone:
            return  # nothing to average, and nothing to pay
        for parameter in self._owned():
            if parameter.requires_grad and parameter not in self._hooks:
                self._hook(parameter)
        self.pending.set_groups(
            [p for p in group if p.requires_grad and p in self._hooks] for group in self._groups
        )

    def _hook(self, parameter: torch.Tensor) -> None:
        self._names.setdefault(parameter, f"added.{len(self._names)}")
        previous = getattr(parameter, _OWNER, lambda: None)()
        if previous is not None:
            previous.release(parameter)
        me = weakref.ref(self)
        setattr(parameter, _OWNER, me)
        register: Any = parameter.register_post_accumulate_grad_hook
        self._hooks[parameter] = register(_hook(me))

    def release(self, parameter: torch.Tensor) -> None:
        """Let go of a parameter that another optimizer has taken over."""
        hook = self._hooks.pop(parameter, None)
        if hook is not None:
            hook.remove()

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Act on a gradient that a backward pass has completed."""
        self.forget_ended_job()
        self.fresh = True
        self.pending.ready(parameter)

    def _start(self, parameters: Sequence[torch.Tensor]) -> dict[torch.Tensor, Any]:
        if len(parameters) == 1:  # the usual case, once per parameter and step
            (parameter,) = parameters
            return {parameter: self._start_one(parameter, self._taken(parameter), None)}
        gradients = {p: self._taken(p) for p in parameters}
        dense = [p for p, gradient in gradients.items() if not gradient.is_sparse]
        group = None
        if len(dense) > 1:
            group = Group(f"{self._prefix}group.{self._names[dense[0]]}", len(dense))
        return {p: self._start_one(p, gradient, group) for p, gradient in gradients.items()}

    def _size_bytes(self, parameter: torch.Tensor) -> int:
        gradient = self._gradient(parameter)
        return BATCH_BYTES if gradient.is_sparse else gradient.nbytes

    def _taken(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the gradient that was there when it became ready."""
        taken = self._reduced.get(parameter)
        return self._gradient(parameter) if taken is None else taken

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse and self._reduction.sparse_as_dense:
            gradient = parameter.grad = gradient.to_dense()
        self._reduced[parameter] = gradient
        return gradient

    def _start_one(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: Group | None
    ) -> Any:
        if gradient.is_sparse:
            return self._start_sparse(parameter, gradient)
        prepared = self._prepared.get(parameter)
        if prepared is None or prepared.dtype != gradient.dtype:
            name = self._names[parameter]
            prepared = self._prepared[parameter] = GradientAllreduce(
                self._prefix + name, name, gradient.shape, gradient.dtype, self._reduction
            )
        return prepared.start(gradient, group)

    def _start_sparse(self, parameter: torch.Tensor, gradient: torch.Tensor) -> Handle:
        name = self._names[parameter]

        def replace(reduced: torch.Tensor) -> None:
            if parameter.grad is gradient:  # else finish() complains
                parameter.grad = self._reduced[parameter] = reduced
            refuse_nonfinite(reduced, name)

        return start_sparse(gradient, self._prefix + name, self._reduction).then(replace)

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
        self.fresh = False
        taking_part = [p for p in self._owned() if p in self._hooks and p.requires_grad]
        try:
            if not self.alone:
                self._layouts.compare(taking_part)
            nonfinite = self.pending.finish(taking_part, self._give_gradient)
            for parameter, gradient in self._reduced.items():
                if parameter.grad is not gradient:
                    raise UsageError(
                        f"the gradient of {self._names[parameter]!r} was replaced between "
                        "backward() and step(), so its average is lost; call "
                        "optimizer.synchronize() before you change gradients"
                    )
        finally:
            self._reduced.clear()
        return nonfinite

    def _give_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = self._layouts.zero_gradient(parameter)

    def forget_ended_job(self) -> None:
        """Forget what was under way when the job was shut down, if it has been since."""
        if self._job() is not basics.context():
            self._job = weakref.ref(basics.context())
            self.pending.forget()
            self._prepared.clear()
            self._reduced.clear()
            self.fresh = False

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
