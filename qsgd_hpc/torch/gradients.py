"""Hands each gradient to the engine as soon as the backward pass has completed it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from qsgd_hpc import basics
from qsgd_hpc._base.pending import PendingGradients
from qsgd_hpc.errors import UsageError
from qsgd_hpc.ops import Handle, Op
from qsgd_hpc.torch.ops import allreduce_gradient_async

__all__ = ["GradientReducer"]

_OWNER = "_qsgd_hpc_reducer"  # on a parameter: a weak reference to the reducer that has hooked it


class GradientReducer:
    """Averages (or sums) over the ranks the gradients of an optimizer's parameters.

    Parameters that are unfrozen or added later are taken in at the next ``finish``.

    Args:
        groups: the optimizer's ``param_groups``, looked at again at every step.
        named_parameters: names for messages; None numbers the parameters.
        compression: one of ``hvd.Compression``.
        op: Average or Sum.
        passes: backward passes that add up before one reduction.
    Raises:
        UsageError: names doubled or missing.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        *,
        compression: Any,
        op: Op,
        passes: int,
    ) -> None:
        self._groups = groups
        self._compression = compression
        self._op = op
        self._names = _names(list(self._owned()), named_parameters)
        self._reduced: dict[torch.Tensor, torch.Tensor] = {}
        self._hooks: dict[torch.Tensor, Any] = {}
        self._pending = PendingGradients(passes=passes, start=self._start)
        # A second optimizer of a model needs names of its own; ranks build them in one order.
        number = basics.next_number("optimizer")
        self._prefix = f"gradient.{number}." if number else "gradient."
        self.fresh = False
        """Whether a backward pass has completed a gradient since ``finish``."""
        self.adopt()

    def _owned(self) -> Iterable[torch.Tensor]:
        return (p for group in self._groups for p in group["params"])

    def adopt(self) -> None:
        """Hook every parameter that takes a gradient and is not hooked yet."""
        if basics.size() == 1:
            return  # alone there is nothing to average, and nothing to pay
        for parameter in self._owned():
            if not parameter.requires_grad or parameter in self._hooks:
                continue
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
        self.fresh = True
        self._pending.ready(parameter)

    def _start(self, parameter: torch.Tensor) -> Handle:
        gradient = parameter.grad
        assert gradient is not None
        self._reduced[parameter] = gradient
        return allreduce_gradient_async(
            gradient, self._prefix + self._names[parameter], self._op, self._compression
        )

    def finish(self) -> None:
        """Wait until every gradient is reduced.

        Raises:
            UsageError: a gradient was replaced after its backward pass.
            HorovodInternalError: a reduction failed.
        """
        self.adopt()
        self.fresh = False
        taking_part = [p for p in self._owned() if p in self._hooks and p.requires_grad]
        try:
            self._pending.finish(taking_part, _give_zero_gradient)
            for parameter, gradient in self._reduced.items():
                if parameter.grad is not gradient:
                    raise UsageError(
                        f"the gradient of {self._names[parameter]!r} was replaced between "
                        "backward() and step(), so its average is lost; call "
                        "optimizer.synchronize() before you change gradients"
                    )
        finally:
            self._reduced.clear()

    @property
    def busy(self) -> bool:
        """Whether gradients are being reduced."""
        return self._pending.any


def _hook(reducer: weakref.ref[GradientReducer]) -> Any:
    # Weak: a parameter must not keep an optimizer alive that the script has dropped.
    def on_gradient(parameter: torch.Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive.on_gradient(parameter)

    return on_gradient


def _give_zero_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)


def _names(
    owned: list[torch.Tensor], named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    if named_parameters is None:
        return {p: str(i) for i, p in enumerate(owned)}
    pairs = list(named_parameters)
    texts = [name for name, _ in pairs]
    doubled = sorted({name for name in texts if texts.count(name) > 1})
    if doubled:
        raise UsageError(f"named_parameters has these names more than once: {', '.join(doubled)}")
    names = {parameter: name for name, parameter in pairs}
    lost = [tuple(p.shape) for p in owned if p not in names]
    if lost:
        raise UsageError(
            f"named_parameters lacks {len(lost)} of the optimizer's {len(owned)} parameters "
            f"(shapes {', '.join(map(str, lost[:5]))}); pass model.named_parameters() of the same "
            "model"
        )
    return {p: names[p] for p in owned}
