"""``DistributedOptimizer``: averages gradients over the ranks during the backward pass."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._compile import _disable_dynamo

from qsgd_hpc.compression import Lossy
from qsgd_hpc.errors import NonFiniteGradientError, UsageError
from qsgd_hpc.frameworks.grouping import checked_passes, choose_groups
from qsgd_hpc.frameworks.reduction import GradientReduction, checked_reduction
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.ops import Adasum, Average, Max, Op, Sum
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.torch.amp import make_loss_scalers_wait
from qsgd_hpc.torch.gradients import GradientReducer
from qsgd_hpc.torch.ops import allreduce
from qsgd_hpc.torch.parameters import Claim, name_parameters, parameters_of
from qsgd_hpc.torch.prepared import GradientAllreduce, mark_step

__all__ = ["DistributedOptimizer"]


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
    if isinstance(optimizer, _Wrapped):
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
        distributed = _wrap(optimizer, _Adasum)
        distributed.begin(named_parameters, reduction)
        distributed.set_backward_passes_per_step(backward_passes_per_step)
    else:
        distributed = _wrap(optimizer, _Averaging)
        distributed.begin(named_parameters, reduction, backward_passes_per_step, grouping)
    return distributed


class _Wrapped(torch.optim.Optimizer):
    """An optimizer that wraps another one.

    It is pickled and saved as the wrapped optimizer, because the job that loads it may have another
    number of ranks.
    """

    _unwrapped: Any
    _copies = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle accepts an object of another class only as the result of a call.
        return copy.copy, (self._plain(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a distributed optimizer of copied parameters."""
        distributed = _wrap(copy.deepcopy(self._plain(), memo), type(self).__bases__[0])
        # The suffix takes no number from the shared count, because only rank 0 may make copies.
        self._copies += 1
        distributed.begin_copy(self, f"copy{self._copies}.", memo)
        return distributed

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state; see ``torch.optim.Optimizer.load_state_dict``."""
        super().load_state_dict(state_dict)
        # torch creates new groups and state. A scheduler that was built on the unwrapped optimizer
        # would change the rates of the old groups.
        kept = {"state": self.state, "param_groups": self.param_groups}
        vars(self._unwrapped).update(kept)

    def begin_copy(self, original: Any, suffix: str, memo: dict[int, Any]) -> None:
        """Initialise the wrapper of a copy with the original's arguments.

        Args:
            original: an optimizer of the same class.
            suffix: suffix of the operations' names.
            memo: the copy of each parameter, by the parameter's ``id``.
        """
        raise NotImplementedError

    def _plain(self) -> Any:
        """Return an instance of the wrapped class with the current state."""
        plain = object.__new__(type(self._unwrapped))
        kept = {k: vars(self).get(k, v) for k, v in vars(self._unwrapped).items()}
        plain.__dict__.update(kept)
        return plain


def _wrap(optimizer: torch.optim.Optimizer, ours: type[_Wrapped]) -> Any:
    """Return an instance of the optimizer's class and ours that has the optimizer's state."""
    kind = type(optimizer)
    wrapped: Any = type(kind.__name__, (ours, kind), {})
    distributed = wrapped.__new__(wrapped)
    # A scheduler that was built earlier has stored its counting wrapper of ``step`` in the
    # instance, which would hide the step of the new class.
    distributed.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    distributed._unwrapped = optimizer
    return distributed


class _Averaging(_Wrapped):
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

    def begin_copy(self, original: _Averaging, suffix: str, memo: dict[int, Any]) -> None:
        """Initialise the wrapper of a copy with the original's arguments."""
        its = original._reducer
        names = [(name, memo.get(id(p), p)) for p, name in its.names.items()]
        groups = [[memo.get(id(p), p) for p in group] for group in its.groups]
        passes = its.passes
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
        self._reducer.set_passes(passes)

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes per reduction; assigning a number changes it."""
        return self._reducer.passes

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

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Discard the gradients and reset the count of backward passes.

        Some classes take no ``set_to_none``, so the arguments are those of the wrapped optimizer.

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
        super().zero_grad(*args, **kwargs)


class _Adasum(_Wrapped):
    """Methods added to an optimizer whose steps are combined: ranks step independently before.

    Adasum (Maleki et al., *Scaling distributed training with adaptive summation*, MLSys 2021) adds
    the orthogonal components of two updates and averages the parallel ones, so one rank's learning
    rate is also suitable for many ranks. It combines the optimizers' steps, not the gradients.
    """

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

    def begin_copy(self, original: _Adasum, suffix: str, memo: dict[int, Any]) -> None:
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


# torch would otherwise put its step hooks around these steps, too, as around the wrapped ones.
for _kind in (_Averaging, _Adasum):
    _kind.step.hooked = True  # type: ignore[attr-defined]
