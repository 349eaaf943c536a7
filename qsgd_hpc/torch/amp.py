"""Make torch's loss scaler wait for gradients before it reads them, and report skipped steps.

``torch.amp.GradScaler`` has no hooks, and ``unscale_`` changes gradients in place: while gradients
are being reduced, it would divide some before the sum and some after it, and detect an overflow on
one rank only. Error feedback must know which optimizer has skipped a step. Therefore the two
methods that take an optimizer are wrapped, once per process.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from qsgd_hpc.torch.parameters import parameters_of

__all__ = ["make_loss_scalers_wait", "report_skipped_steps"]

_MARK = "_qsgd_hpc_waits"
_observers: weakref.WeakSet[Any] = weakref.WeakSet()


def report_skipped_steps(observer: Any) -> None:
    """Call ``observer.forget_skipped(parameters)`` after each step that ``observer.scaler`` skips.

    An optimizer whose ``keeps_residuals`` is true need not be registered: its own skipped steps are
    reported to it.

    Args:
        observer: is referred to weakly; its scaler may change.
    """
    make_loss_scalers_wait()
    _observers.add(observer)


def make_loss_scalers_wait() -> None:
    """Wrap ``unscale_`` and ``step`` of every loss scaler, unless they are wrapped already."""
    for name in ("unscale_", "step"):
        method = getattr(torch.amp.GradScaler, name)
        if not hasattr(method, _MARK):
            setattr(torch.amp.GradScaler, name, _waiting(method))


def _has_overflown(scaler: Any, optimizer: Any) -> bool:
    """Return whether a loss scaler has found an Inf or NaN in this step's gradients."""
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    return any(found.item() for found in state.get("found_inf_per_device", {}).values())


def _report_if_skipped(scaler: Any, optimizer: Any) -> None:
    concerned = [each for each in _observers if each.scaler is scaler]
    if getattr(optimizer, "keeps_residuals", False):
        concerned.append(optimizer)
    # Reading the flag waits for the device. A disabled scaler never skips a step, and has no flags.
    if concerned and scaler.is_enabled() and _has_overflown(scaler, optimizer):
        for each in concerned:
            each.forget_skipped(parameters_of(optimizer))


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wait_first(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        complete = getattr(optimizer, "complete_gradients", None)
        if complete is not None:
            complete()
        result = method(scaler, optimizer, *args, **kwargs)
        if method.__name__ == "step":
            _report_if_skipped(scaler, optimizer)
        return result

    setattr(wait_first, _MARK, True)
    return wait_first
