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
    "hook_states",
    "host_group",
    "reduce_scatter_single",
    "say",
    "why_unsupported",
]

HOST = torch.device("cpu")

_NEW = hasattr(dist, "all_gather_single")  # torch 2.13, where the older names are deprecated
all_gather_single: Any = dist.all_gather_single if _NEW else dist.all_gather_into_tensor
reduce_scatter_single: Any = dist.reduce_scatter_single if _NEW else dist.reduce_scatter_tensor


def why_unsupported(group: Any, device: torch.device) -> str | None:
    """Return why the group cannot send from the memory of such a device; None: it can."""
    try:
        group._get_backend(device)
    except RuntimeError as error:
        return str(error)
    return None


def host_group(group: Any) -> Any:
    """Return a group of the same ranks that supports host memory: this, or a new gloo group.

    Collective over the group.

    Raises:
        UsageError: the group does not support host memory, and is not the group of all ranks: to
            create another group, torch requires that ranks outside it participate, too.
    """
    reason = why_unsupported(group, HOST)
    if reason is None:
        return group
    if group is dist.group.WORLD and dist.is_gloo_available():
        return dist.new_group(backend="gloo")
    raise UsageError(
        "codes are sent from host memory, which this process group does not support "
        f"({reason}). Call init_process_group() without a backend, or with "
        "'cpu:gloo,cuda:nccl'; or give QSGDState a group of backend='gloo' over the same ranks"
    )


def hook_states(model: Any) -> list[Any]:
    """Return the states of the hooks that a DDP model has; None for a hook built into torch."""
    states = [state for _, state in model._comm_hooks]
    # torch keeps no list of its built-in hooks, but logs their name.
    return states or ([None] if model._get_ddp_logging_data().get("comm_hook") else [])


def say(text: str, group: Any = None) -> None:
    """Print a line for the user, only on the first rank of a process group; None: of all ranks."""
    if dist.get_rank(group) == 0:
        rank = dist.get_rank()
        sys.stderr.write(f"qsgd-hpc: {f'rank {rank}: ' if rank else ''}{text}\n")
        sys.stderr.flush()
