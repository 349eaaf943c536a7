"""``DistributedOptimizer(op=hvd.Adasum)``: ranks step on their own, and combine their steps.

Adasum (Maleki et al., *Scaling distributed training with adaptive summation*, MLSys 2021) adds what
is orthogonal in two updates and averages what is parallel, so the learning rate of one rank keeps
its meaning on many. It is the optimizer's steps, not the gradients, that are combined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._compile import _disable_dynamo

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.gradient_reduction import GradientReduction
from qsgd_hpc.frameworks.pending import checked_passes
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.ops import Max
from qsgd_hpc.torch.claims import Claim
from qsgd_hpc.torch.naming import name_parameters
from qsgd_hpc.torch.ops import allreduce
from qsgd_hpc.torch.prepared import GradientAllreduce
from qsgd_hpc.torch.step_mark import mark_step
from qsgd_hpc.torch.wrapped import Wrapped

__all__ = ["AdasumOptimizer"]


class AdasumOptimizer(Wrapped):
    """The additional work of an optimizer whose steps are combined."""

    _reduction: GradientReduction
    _names: dict[torch.Tensor, str]
    _prefix: str
    _claim: Claim

    def begin(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        reduction: GradientReduction,
        prefix: str | None = None,
    ) -> None:
        """Take up what the optimizer was wrapped with.

        Args:
            named_parameters: names for messages; None numbers the parameters.
            reduction: what becomes of the steps.
            prefix: prefix of the operations' names, equal on every rank; None creates one.
        Raises:
            UsageError: names are duplicated or missing.
        """
        self._reduction = reduction
        self._names = name_parameters(list(self._owned()), named_parameters)
        self._prefix = prefix or f"step.{basics.next_number('adasum')}."
        # This steps with the rank's own gradients, which must not be averaged.
        self._claim = Claim(self)
        self._claim.claim(self._owned())

    def begin_copy(self, original: AdasumOptimizer, suffix: str, memo: dict[int, Any]) -> None:
        """Take up what the original was wrapped with."""
        names = [(name, memo.get(id(p), p)) for p, name in original._names.items()]
        self.begin(names, original._reduction, original._prefix + suffix)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank; see ``torch.optim.Optimizer.add_param_group``."""
        super().add_param_group(param_group)
        self._claim.claim(self._owned())

    def _owned(self) -> Iterable[torch.Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    @functools.partial(_disable_dynamo, recursive=False)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do the wrapped optimizer's step, then replace it by the Adasum of all ranks' steps.

        Raises:
            HorovodInternalError: a reduction failed; the parameters are what they were.
        """
        self._unwrapped._opt_called = True
        if self._reduction.alone:
            result = super().step(closure)
            mark_step((p.grad for p in self._owned()), self._prefix)
            return result
        starts = {p: p.detach().clone() for p in self._owned() if p.requires_grad}
        result = super().step(closure)
        self._combine(starts)
        return result

    @_disable_dynamo
    @torch.no_grad()
    def _combine(self, starts: dict[torch.Tensor, torch.Tensor]) -> None:
        for parameter, start in starts.items():
            parameter.sub_(start)  # now holds the step
        try:
            for handle in [self._reduce(parameter) for parameter in starts]:
                handle.wait()
        except BaseException:
            for parameter, start in starts.items():
                parameter.copy_(start)
            raise
        for parameter, start in starts.items():
            parameter.add_(start)

    def _reduce(self, parameter: torch.Tensor) -> Any:
        name = self._names.setdefault(parameter, f"added.{len(self._names)}")
        shape, dtype = parameter.shape, parameter.dtype
        # Not kept for the next step: it would outlive the job.
        allreduce_ = GradientAllreduce(self._prefix + name, name, shape, dtype, self._reduction)
        return allreduce_.start(parameter.detach())

    @torch.no_grad()
    def settle_gradients(self) -> None:
        """Have a loss scaler find the same on every rank: an overflow anywhere is one here."""
        if self._reduction.alone:
            return
        gradients = [_entries(p.grad) for p in self._owned() if p.grad is not None]
        mine = not all(bool(g.isfinite().all()) for g in gradients)
        anywhere = allreduce(
            torch.tensor([int(mine)]),
            name=f"overflow.{self._prefix}",
            op=Max,
            process_set=self._reduction.process_set,
        )
        if bool(anywhere) and not mine:
            for gradient in gradients:
                gradient.fill_(float("inf"))

    def synchronize(self) -> None:
        """Return: gradients stay this rank's own, and may be clipped before ``step``."""

    def skip_synchronize(self) -> Any:
        """Raise: a step without the other ranks' would let the replicas differ."""
        raise UsageError("op=hvd.Adasum combines the ranks' steps in step(); it cannot be skipped")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accept a number of passes; gradients add up until ``step`` is called, however many."""
        checked_passes(passes)


def _entries(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's memory, that of the entries if it is sparse."""
    return gradient._values() if gradient.is_sparse else gradient


# As for other distributed optimizers: torch's step hooks are around the wrapped step.
AdasumOptimizer.step.hooked = True  # type: ignore[attr-defined]
