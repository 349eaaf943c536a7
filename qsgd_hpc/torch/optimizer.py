"""``DistributedOptimizer``: averages gradients over the ranks during the backward pass."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._compile import _disable_dynamo

from qsgd_hpc.compression import Lossy
from qsgd_hpc.errors import NonFiniteGradientError, UsageError
from qsgd_hpc.frameworks.pending import choose_groups
from qsgd_hpc.frameworks.reduction import GradientReduction, checked_reduction
from qsgd_hpc.runtime.ops import Adasum, Average, Op
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.torch.adasum_optimizer import AdasumOptimizer
from qsgd_hpc.torch.amp import make_loss_scalers_wait
from qsgd_hpc.torch.gradients import GradientReducer
from qsgd_hpc.torch.ops import allreduce
from qsgd_hpc.torch.parameters import parameters_of
from qsgd_hpc.torch.prepared import mark_step
from qsgd_hpc.torch.wrapped import Wrapped, wrap

__all__ = ["DistributedOptimizer"]


class _Distributed(Wrapped):
    """Methods added to an optimizer whose gradients are averaged."""

    _reducer: GradientReducer
    _reduction: GradientReduction
    _synchronized: bool
    _completed: bool
    _skip: bool
    _nonfinite: NonFiniteGradientError | None

    def begin(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        reduction: GradientReduction,
        passes: int,
        groups: int | Sequence[Sequence[torch.Tensor]],
        prefix: str | None = None,
    ) -> None:
        """Initialise the wrapper; see :class:`GradientReducer`."""
        self._reduction = reduction
        self._synchronized = self._completed = self._skip = False
        self._nonfinite = None
        self._reducer = GradientReducer(
            self, named_parameters, reduction, passes=passes, groups=groups, prefix=prefix
        )

    def begin_copy(self, original: _Distributed, suffix: str, memo: dict[int, Any]) -> None:
        """Initialise the wrapper of a copy with the original's arguments."""
        its = original._reducer
        names = [(name, memo.get(id(p), p)) for p, name in its.names.items()]
        groups = [[memo.get(id(p), p) for p in group] for group in its.groups]
        passes = its.pending.passes
        self.begin(names, original._reduction, passes, groups, its.prefix + suffix)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank; see ``torch.optim.Optimizer.add_param_group``."""
        super().add_param_group(param_group)
        self._reducer.adopt()

    def synchronize(self) -> None:
        """Wait until all gradients are averaged, to clip or inspect them before ``step``.

        NaN or Inf in a gradient are then present on every rank; ``step`` raises the error.
        """
        self._nonfinite = self._reducer.finish()
        self._synchronized = True

    def complete_gradients(self) -> None:
        """Synchronize, unless done since the last backward pass; for loss scalers and ``step``."""
        if not (self._skip or self._reduction.alone or self._is_reduced()):
            self._nonfinite = self._reducer.finish()
            self._completed = True

    @property
    def keeps_residuals(self) -> bool:
        """Whether error feedback may have residuals, which a skipped step makes wrong."""
        return isinstance(self._reduction.compression, Lossy) and not self._reduction.alone

    def forget_skipped(self, parameters: Iterable[torch.Tensor]) -> None:
        """After a loss scaler has skipped a step, drop the residuals, which are of its gradients.

        Those of finite tensors, too: in units of the new, smaller scale they would be too large.

        Args:
            parameters: of this optimizer, all of them.
        """
        self._reducer.residuals.forget()

    def _is_reduced(self) -> bool:
        return (self._synchronized or self._completed) and not self._reducer.fresh

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make ``step`` in the block use the gradients without averaging, after ``synchronize``."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per reduction, from the next step on.

        Raises:
            UsageError: less than 1, or between ``backward`` and ``step``.
        """
        self._reducer.pending.set_passes(passes)

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes per reduction; assigning a number changes it."""
        return self._reducer.pending.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    # torch.compile(optimizer.step) compiles the wrapped step, but must not trace waiting for ranks.
    @functools.partial(_disable_dynamo, recursive=False)
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, then execute the wrapped optimizer's step.

        Raises:
            NonFiniteGradientError: a gradient holds NaN or Inf, on every rank; nothing has
                been changed. With a loss scaler, ``step`` is not called with such gradients.
            HorovodInternalError: a reduction failed.
        """
        if not self._skip and not self._reduction.alone:
            if closure is not None:
                closure = self._averaging(closure)
            elif self._synchronized and self._is_reduced():
                warnings.warn(
                    "step() after synchronize(): the gradients are already averaged and are "
                    "not averaged again; call step() within 'with "
                    "optimizer.skip_synchronize():'",
                    stacklevel=2,
                )
            else:
                self.complete_gradients()
        self._synchronized = self._completed = False
        self._refuse_nonfinite()
        # A scheduler that was built on the unwrapped optimizer reads this mark from it.
        self._unwrapped._opt_called = True
        result = super().step(closure)
        if self._reduction.alone:
            mark_step((p.grad for p in parameters_of(self)), self._reducer.prefix)
        return result

    def _refuse_nonfinite(self) -> None:
        error, self._nonfinite = self._nonfinite, None
        # Loss scalers call fused optimizers in any case; these skip their step if the flag is set.
        if error is not None and getattr(self, "found_inf", None) is None:
            raise error

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure with averaged gradients and loss, so that line searches are equal."""

        def averaged() -> Any:
            loss = closure()
            self._nonfinite = self._reducer.finish()
            self._refuse_nonfinite()
            if loss is None:  # most optimizers do not use it
                return None
            return allreduce(
                torch.as_tensor(loss).detach(),
                name="closure.loss",
                op=self._reduction.op,
                process_set=self._reduction.process_set,
            )

        return averaged

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients and reset the count of backward passes.

        Raises:
            UsageError: between ``backward`` and ``step``, while they are being averaged.
        """
        if self._reducer.busy:
            raise UsageError(
                "zero_grad() while gradients are being averaged: call it after step(), or call "
                "synchronize() first. If they came from the loss of another model (a GAN's "
                "generator), keep it out with requires_grad_(False) on these parameters meanwhile."
            )
        self._reducer.discard()
        self._synchronized = self._completed = False
        self._nonfinite = None
        super().zero_grad(set_to_none)


# torch would otherwise put its step hooks around this step, too, when a state is loaded.
_Distributed.step.hooked = True  # type: ignore[attr-defined]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap an optimizer so that every step uses the average of all ranks' gradients.

    Each gradient is submitted as soon as the backward pass has computed it, so communication
    overlaps with computing. A rank without a gradient for a parameter (an unused branch)
    contributes zeros. A parameter that has had no gradient on any rank so far gets none.

    ``torch.amp.GradScaler`` needs no extra call: ``scaler.unscale_`` and ``scaler.step`` first wait
    for the averages. An overflow on one rank is therefore seen on every rank, and all skip the step
    and lower the scale. Error feedback discards the residual of such a gradient.

    Several optimizers may share parameters; while they exist, gradients are reduced in ``step``,
    not earlier. The result is saved and pickled as the wrapped optimizer; a deep copy is
    distributed, too.

    Args:
        optimizer: any torch optimizer; its parameter groups and state are used.
        named_parameters: ``model.named_parameters()``: names of the gradients, equal on every rank.
        compression: one of ``hvd.Compression``; None uses ``QSGD_BITS`` or ``QSGD_SCHEME``,
            else no compression.
        backward_passes_per_step: number of backward passes whose gradients are summed before a
            reduction, as torch does; divide the loss by it to get the mean.
        op: Average, Sum, or Adasum. With Adasum, each rank executes the optimizer's step with
            its own gradients, and ``step`` combines the ranks' steps, uncompressed (``groups`` and
            sparse gradients have no effect then).
        gradient_predivide_factor: splits the average: gradients are divided by it before the
            sum and by size / factor after it, which keeps sums of float16 in range.
        num_groups: deprecated: a number for ``groups``.
        groups: number of groups of neighbouring parameters, or the groups as lists of
            parameters: the gradients of a group are submitted and reduced together. Parameters
            without a group are reduced separately.
        sparse_as_dense: sends sparse gradients as dense ones and converts them back; else all
            ranks' entries are gathered, uncompressed, which is efficient if there are few.
        process_set: the ranks that average; ranks outside the set train separately.
    Returns:
        The optimizer, which is also an instance of the wrapped class, with ``synchronize``,
        ``skip_synchronize`` and ``set_backward_passes_per_step``.
    Raises:
        UsageError: names are duplicated or missing, or arguments are out of range.
    """
    if isinstance(optimizer, Wrapped):
        raise UsageError("this optimizer is already a DistributedOptimizer; wrap it once")
    if not hasattr(optimizer, "param_groups"):
        raise UsageError(
            "DistributedOptimizer takes an optimizer, such as torch.optim.SGD(...), not "
            f"{optimizer!r}"
        )
    reduction = checked_reduction(
        op, compression, gradient_predivide_factor, sparse_as_dense, process_set
    )
    grouping = choose_groups(num_groups, groups)
    make_loss_scalers_wait()
    if op is Adasum:
        distributed = wrap(optimizer, AdasumOptimizer)
        distributed.begin(named_parameters, reduction)
        distributed.set_backward_passes_per_step(backward_passes_per_step)
    else:
        distributed = wrap(optimizer, _Distributed)
        distributed.begin(named_parameters, reduction, backward_passes_per_step, grouping)
    return distributed
