"""Make torch's loss scaler wait for a distributed optimizer's gradients before it reads them.

``torch.amp.GradScaler`` has no hooks, and ``unscale_`` changes gradients in place: while gradients
are being reduced, it would divide some before the sum and some after it, and detect an overflow on
one rank only. Therefore its two methods that take an optimizer are wrapped, once per process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["make_loss_scalers_wait"]

_MARK = "_qsgd_hpc_waits"


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


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wait_first(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        complete = getattr(optimizer, "complete_gradients", None)
        if complete is not None:
            complete()
        result = method(scaler, optimizer, *args, **kwargs)
        forget = getattr(optimizer, "forget_skipped", None)
        if forget is not None and method.__name__ == "step":
            forget(lambda: _has_overflown(scaler, optimizer))
        return result

    setattr(wait_first, _MARK, True)
    return wait_first
