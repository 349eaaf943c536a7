"""Queries of torch.distributed's process groups, for all supported versions of torch."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from qsgd_hpc.errors import UsageError

__all__ = [
    "HOST",
    "all_gather_single",
    "host_carrier",
    "reduce_scatter_single",
    "say",
    "why_not_carried",
]

HOST = torch.device("cpu")

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


def host_carrier(group: Any) -> Any:
    """Return a group of the same ranks that carries the hosts' memory: this, or a new one of gloo.

    All ranks of the group call it together.

    Raises:
        UsageError: it carries none, and is not the group of all ranks: torch makes others only
            where those that are not in them call, too.
    """
    reason = why_not_carried(group, HOST)
    if reason is None:
        return group
    if group is dist.group.WORLD and dist.is_gloo_available():
        return dist.new_group(backend="gloo")
    raise UsageError(
        "codes are sent from host memory, which this process group does not support "
        f"({reason}). Call init_process_group() without a backend, or with "
        "'cpu:gloo,cuda:nccl'; or give QSGDState a group of backend='gloo' over the same ranks"
    )


def say(text: str) -> None:
    """Print a line for the user, on rank 0 of torch.distributed alone."""
    if dist.get_rank() == 0:
        sys.stderr.write(f"qsgd-hpc: {text}\n")
        sys.stderr.flush()
