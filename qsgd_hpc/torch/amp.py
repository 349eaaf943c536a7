"""Lets torch's loss scaler wait for a distributed optimizer's gradients before it reads them.

``torch.amp.GradScaler`` has no hooks, and ``unscale_`` works on gradients in place: on gradients
that are being reduced it would divide some before the sum and some after it, and find an overflow
on one rank alone. So its two methods that are given an optimizer are wrapped, once per process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["make_loss_scalers_wait"]

_MARK = "_qsgd_hpc_waits"


def make_loss_scalers_wait() -> None:
    """Wrap ``unscale_`` and ``step`` of every loss scaler; harmless when done already."""
    for name in ("unscale_", "step"):
        method = getattr(torch.amp.GradScaler, name)
        if not hasattr(method, _MARK):
            setattr(torch.amp.GradScaler, name, _waiting(method))


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wait_first(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        settle = getattr(optimizer, "settle_gradients", None)
        if settle is not None:
            settle()
        return method(scaler, optimizer, *args, **kwargs)

    setattr(wait_first, _MARK, True)
    return wait_first
