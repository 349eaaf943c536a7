"""``DistributedOptimizer``: gradients are averaged over the ranks while the backward pass runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qsgd_hpc import basics
from qsgd_hpc.compression import Qsgd, from_environment
from qsgd_hpc.errors import UsageError
from qsgd_hpc.ops import Average, Op, Sum
from qsgd_hpc.torch.compression import NoneCompressor
from qsgd_hpc.torch.gradients import GradientReducer
from qsgd_hpc.torch.ops import allreduce

__all__ = ["DistributedOptimizer"]


class _Distributed(torch.optim.Optimizer):
    """What a wrapped optimizer does besides its own step."""

    _reducer: GradientReducer
    _op: Op
    _unwrapped: Any
    _synchronized: bool
    _skip: bool

    def synchronize(self) -> None:
        """Wait until every gradient is averaged; for clipping before ``step``."""
        self._reducer.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` inside use the gradients as they are, after ``synchronize``."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, then do the wrapped optimizer's step."""
        if not self._skip and basics.size() > 1:
            if closure is not None:
                closure = self._averaging(closure)
            elif self._synchronized and not self._reducer.fresh:
                warnings.warn(
                    "step() after synchronize(): the gradients are averaged already and are used "
                    "as they are; say so with 'with optimizer.skip_synchronize():'",
                    stacklevel=2,
                )
            else:
                self._reducer.finish()
        self._synchronized = False
        # A scheduler that was built on the unwrapped optimizer looks there for this mark.
        self._unwrapped._opt_called = True
        return super().step(closure)

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Average what a closure returns, too: a line search must decide alike on every rank."""

        def averaged() -> Any:
            loss = closure()
            self._reducer.finish()
            return allreduce(torch.as_tensor(loss).detach(), name="closure.loss", op=self._op)

        return averaged

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients.

        Raises:
            UsageError: between ``backward`` and ``step``, while they are being averaged.
        """
        if self._reducer.busy:
            raise UsageError(
                "zero_grad() while gradients are being averaged: call it after step(), or call "
                "synchronize() first"
            )
        self._synchronized = False
        super().zero_grad(set_to_none)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a distributed optimizer cannot be copied or pickled; save optimizer.state_dict() and "
            "load it into a new one"
        )


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Op = Average,
) -> Any:
    """Wrap an optimizer so that every step uses the average of all ranks' gradients.

    Each gradient is handed over as soon as the backward pass has completed it, so communication
    overlaps with computing.

    Args:
        optimizer: any torch optimizer; its parameter groups and state are taken over.
        named_parameters: ``model.named_parameters()``: names for messages, equal on every rank.
        compression: one of ``hvd.Compression``; None takes ``QSGD_BITS``, else no compression.
        backward_passes_per_step: backward passes whose gradients add up before one reduction, as
            torch adds them; divide the loss by their number for their mean.
        op: Average or Sum.
    Returns:
        The optimizer, an instance of its own class too, with ``synchronize`` and
        ``skip_synchronize``.
    Raises:
        UsageError: names doubled or missing, or arguments out of range.
    """
    if isinstance(optimizer, _Distributed):
        raise UsageError("this optimizer is a DistributedOptimizer already; wrap it once")
    if op not in (Average, Sum):
        raise UsageError(f"DistributedOptimizer(op={op!r}): choose hvd.Average or hvd.Sum")
    if compression is None:
        compression = from_environment() or NoneCompressor
    if not isinstance(compression, Qsgd) and not hasattr(compression, "compress"):
        raise UsageError(
            f"compression={compression!r}: choose one of hvd.Compression, such as "
            "hvd.Compression.qsgd(bits=4)"
        )
    kind = type(optimizer)
    wrapped: Any = type(kind.__name__, (_Distributed, kind), {})
    distributed = wrapped.__new__(wrapped)
    # A scheduler that was built earlier has put its count around the unwrapped step into the
    # instance; the class's own step must be found instead.
    distributed.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    distributed._op = op
    distributed._unwrapped = optimizer
    distributed._synchronized = distributed._skip = False
    distributed._reducer = GradientReducer(
        distributed.param_groups,
        named_parameters,
        compression=compression,
        op=op,
        passes=backward_passes_per_step,
    )
    return distributed
