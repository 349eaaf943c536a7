"""``DistributedOptimizer(op=hvd.Adasum)``: ranks step independently, then combine their steps.

Adasum (Maleki et al., *Scaling distributed training with adaptive summation*, MLSys 2021) adds the
orthogonal components of two updates and averages the parallel ones, so one rank's learning rate is
also suitable for many ranks. It combines the optimizers' steps, not the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._compile import _disable_dynamo

from qsgd_hpc.errors import UsageError
from qsgd_hpc.frameworks.pending import checked_passes
from qsgd_hpc.frameworks.reduction import GradientReduction
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.ops import Max, Sum
from qsgd_hpc.torch.ops import allreduce
from qsgd_hpc.torch.parameters import Claim, name_parameters, parameters_of
from qsgd_hpc.torch.prepared import GradientAllreduce, mark_step
from qsgd_hpc.torch.wrapped import Wrapped

__all__ = ["AdasumOptimizer"]


class AdasumOptimizer(Wrapped):
    """Methods added to an optimizer whose steps are combined."""

    _reduction: GradientReduction
    _names: dict[torch.Tensor, str]
    _prefix: str
    _claim: Claim
    _trained: set[int]
    """The ids of parameters that have required a gradient in some step."""

    def begin(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        reduction: GradientReduction,
        prefix: str | None = None,
    ) -> None:
        """Initialise the wrapper.

        Args:
            named_parameters: names for messages; None numbers the parameters.
            reduction: the reduction of the steps.
            prefix: prefix of the operations' names, equal on every rank; None creates one.
        Raises:
            UsageError: names are duplicated or missing.
        """
        self._reduction = reduction
        self._trained = set()
        self._names = name_parameters(parameters_of(self), named_parameters)
        self._prefix = prefix or f"step.{basics.next_number('adasum')}."
        # The claim keeps other optimizers from averaging gradients that this rank steps with.
        self._claim = Claim(self)
        self._claim.claim(parameters_of(self))

    def begin_copy(self, original: AdasumOptimizer, suffix: str, memo: dict[int, Any]) -> None:
        """Initialise the wrapper of a copy with the original's arguments."""
        names = [(name, memo.get(id(p), p)) for p, name in original._names.items()]
        self.begin(names, original._reduction, original._prefix + suffix)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank; see ``torch.optim.Optimizer.add_param_group``."""
        super().add_param_group(param_group)
        self._claim.claim(parameters_of(self))

    @functools.partial(_disable_dynamo, recursive=False)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Execute the wrapped optimizer's step, then replace it by the Adasum of all ranks' steps.

        Raises:
            HorovodInternalError: a reduction failed; the parameters are unchanged.
        """
        self._unwrapped._opt_called = True
        if self._reduction.alone:
            result = super().step(closure)
            mark_step((p.grad for p in parameters_of(self)), self._prefix)
            return result
        starts = {p: p.detach().clone() for p in self._moving()}
        result = super().step(closure)
        self._combine(starts)
        return result

    @_disable_dynamo
    def _moving(self) -> list[torch.Tensor]:
        """Return the parameters that this step may change; collective."""
        owned = parameters_of(self)
        moving = [p for p in owned if p.requires_grad]
        # A frozen parameter that still has a gradient moves on by its momentum, which differs
        # between ranks.
        frozen = [p for p in owned if not p.requires_grad and id(p) in self._trained]
        self._trained.update(map(id, moving))
        if frozen:
            have = torch.tensor([int(p.grad is not None) for p in frozen])
            name, which = f"frozen.{self._prefix}", self._reduction.process_set
            ranks = allreduce(have, name=name, op=Sum, process_set=which).tolist()
            moving += [p for p, count in zip(frozen, ranks, strict=True) if count]
        return moving

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
        # Not stored for the next step, because it would outlive the job.
        allreduce_ = GradientAllreduce(self._prefix + name, name, shape, dtype, self._reduction)
        return allreduce_.start(parameter.detach())

    @torch.no_grad()
    def complete_gradients(self) -> None:
        """Make an overflow on any rank one on every rank, so that all loss scalers agree."""
        if self._reduction.alone:
            return
        gradients = [_entries(p.grad) for p in parameters_of(self) if p.grad is not None]
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
        """Do nothing: gradients stay rank-local, and may be clipped before ``step``."""

    def skip_synchronize(self) -> Any:
        """Raise a UsageError: a step without the other ranks' would let the replicas differ."""
        raise UsageError("op=hvd.Adasum combines the ranks' steps in step(); it cannot be skipped")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Check the number of passes; it has no effect: gradients accumulate until ``step``."""
        checked_passes(passes)


def _entries(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient, or the values of its entries if it is sparse."""
    return gradient._values() if gradient.is_sparse else gradient


# torch's step hooks run around the wrapped step, and must not run around this one, too.
AdasumOptimizer.step.hooked = True  # type: ignore[attr-defined]
