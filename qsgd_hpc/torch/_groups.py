"""What is asked of torch.distributed's process groups, by whatever name a version of torch has."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single", "say", "why_not_carried"]

_NEW = hasattr(dist, "all_gather_single")  # torch 2.13, which warns of the names of old
all_gather_single: Any = dist.all_gather_single if _NEW else dist.all_gather_into_tensor
reduce_scatter_single: Any = dist.reduce_scatter_single if _NEW else dist.reduce_scatter_tensor


def why_not_carried(group: Any, device: torch.device) -> str | None:
    """Return why the group cannot carry the memory of such a device; None: it can."""
    try:
        group._get_backend(device)
    except RuntimeError as error:
        return str(error)
    return None


def say(text: str) -> None:
    """Print a line for the user, on rank 0 of torch.distributed alone."""
    if dist.get_rank() == 0:
        sys.stderr.write(f"qsgd-hpc: {text}\n")
        sys.stderr.flush()
