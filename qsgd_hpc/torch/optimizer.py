"""``DistributedOptimizer``: gradients are averaged over the ranks while the backward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qsgd_hpc import basics
from qsgd_hpc._base.pending import PendingGradients
from qsgd_hpc.compression import from_environment
from qsgd_hpc.errors import UsageError
from qsgd_hpc.ops import Average, Op, Sum
from qsgd_hpc.torch.compression import NoneCompressor
from qsgd_hpc.torch.ops import allreduce_gradient_async

__all__ = ["DistributedOptimizer"]


class _Distributed(torch.optim.Optimizer):
    """What a wrapped optimizer does besides its own step."""

    _pending: PendingGradients
    _hooks: list[Any]
    _synchronized: bool
    _skip: bool

    def synchronize(self) -> None:
        """Wait until every gradient is averaged; for clipping before ``step``."""
        self._pending.finish(_give_zero_gradient)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` inside use the gradients as they are, after ``synchronize``."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Average the gradients, then do the wrapped optimizer's step."""
        if not self._skip and basics.size() > 1:
            if self._synchronized:
                raise UsageError(
                    "step() after synchronize() would average the gradients twice; write "
                    "'with optimizer.skip_synchronize(): optimizer.step()'"
                )
            if closure is not None:
                closure = self._averaging(closure)
            else:
                self._pending.finish(_give_zero_gradient)
        self._synchronized = False
        return super().step(closure)

    def _averaging(self, closure: Callable[[], float]) -> Callable[[], float]:
        def averaged() -> float:
            loss = closure()
            self._pending.finish(_give_zero_gradient)
            return loss

        return averaged

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients.

        Raises:
            UsageError: between ``backward`` and ``step``, while they are being averaged.
        """
        if self._pending.any:
            raise UsageError(
                "zero_grad() while gradients are being averaged: call it after step(), or call "
                "synchronize() first"
            )
        super().zero_grad(set_to_none)


def _give_zero_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)


def _names(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
) -> dict[torch.Tensor, str]:
    """Return a unique name for every parameter of the optimizer.

    Raises:
        UsageError: names are doubled, or some parameter has none.
    """
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return {p: f"gradient.{i}" for i, p in enumerate(owned)}
    pairs = list(named_parameters)
    texts = [name for name, _ in pairs]
    doubled = sorted({name for name in texts if texts.count(name) > 1})
    if doubled:
        raise UsageError(f"named_parameters has these names more than once: {', '.join(doubled)}")
    names = {parameter: f"gradient.{name}" for name, parameter in pairs}
    lost = [tuple(p.shape) for p in owned if p not in names]
    if lost:
        raise UsageError(
            f"named_parameters lacks {len(lost)} of the optimizer's {len(owned)} parameters "
            f"(shapes {', '.join(map(str, lost[:5]))}); pass model.named_parameters() of the same "
            "model"
        )
    return {p: names[p] for p in owned}


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Op = Average,
) -> Any:
    """Wrap an optimizer so that every step uses the average of all ranks' gradients.

    Each gradient is handed over as soon as the backward pass has completed it, so communication
    overlaps with computing. Build learning-rate schedulers on the returned optimizer.

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
    if op not in (Average, Sum):
        raise UsageError(f"DistributedOptimizer(op={op!r}): choose hvd.Average or hvd.Sum")
    if compression is None:
        compression = from_environment() or NoneCompressor
    names = _names(optimizer, named_parameters)

    def start(parameter: torch.Tensor) -> Any:
        assert parameter.grad is not None
        return allreduce_gradient_async(parameter.grad, names[parameter], op, compression)

    trainable = [p for p in names if p.requires_grad]
    kind = type(optimizer)
    wrapped: Any = type(kind.__name__, (_Distributed, kind), {})
    distributed = wrapped.__new__(wrapped)
    distributed.__dict__.update(optimizer.__dict__)
    distributed._synchronized = distributed._skip = False
    distributed._pending = PendingGradients(trainable, passes=backward_passes_per_step, start=start)
    distributed._hooks = []
    if basics.size() > 1:  # alone there is nothing to average, and nothing to pay
        distributed._hooks = [
            p.register_post_accumulate_grad_hook(distributed._pending.ready)  # type: ignore[no-untyped-call]
            for p in trainable
        ]
    return distributed
