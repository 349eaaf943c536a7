"""Process groups of torch.distributed, and the GPU kernels for the tensors that they send.

Gradients of DDP and shards of FSDP2 are coded on their device, and sent by their process group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from qsgd_hpc import _core
from qsgd_hpc._notices import report
from qsgd_hpc.compression import Eden, Lossy, Qsgd
from qsgd_hpc.errors import UsageError
from qsgd_hpc.rules import as_rules
from qsgd_hpc.runtime import gpu

__all__ = [
    "HOST", "all_gather_single", "by_code", "hook_states", "host_group", "reduce_scatter_single",
    "say", "serves", "uploaded", "why_on_host", "why_unsupported",
]  # fmt: skip

HOST = torch.device("cpu")
FEWEST_BITS = 2  # fewest bits of QSGD that the kernels support
MOST_ROTATED = 512  # largest bucket of EDEN, in elements

_said: Counter[str] = Counter()
"""Number of times that this rank has said a text for a process group."""

T = TypeVar("T")

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
    """Print a line for the user, only on the first rank of a process group; None: of all ranks.

    If several groups say the same, as those of a mesh do, only the earliest of them prints it.
    """
    if dist.get_rank(group) == 0 and (group in (None, dist.group.WORLD) or _is_earliest(text)):
        rank = dist.get_rank()
        report(f"rank {rank}: {text}" if rank else text)


def _is_earliest(text: str) -> bool:
    """Return whether no other rank has said this text as often as this one."""
    _said[text] += 1
    try:
        store = dist.distributed_c10d._get_default_store()
        return store.add(f"qsgd-hpc/said/{_said[text]}/{text}", 1) == 1
    except (RuntimeError, AttributeError):  # rank 0, which has it, has ended; MPI has none
        return True


def serves(device: torch.device, compression: Lossy, group: Any) -> str | None:
    """Return the kernels' file if they can code a device's tensors; None: the host must.

    The kernels support QSGD and EDEN. The group must send from the device's memory, as NCCL does.
    """
    return gpu.library() if why_on_host(device, compression, group) is None else None


def why_on_host(device: torch.device, compression: Lossy, group: Any) -> str | None:
    """Return why a device's tensors are coded in host memory; None: coded on the device."""
    library = gpu.library()
    if library is None or gpu.device_type(library) != device.type:
        return gpu.load_fault() or f"this installation has no kernels for {device.type}"
    unknown = _why_unknown(compression) or why_unsupported(group, device)
    if unknown or gpu.serves(device.index or 0):
        return unknown
    return f"the kernels of this installation do not work on {device}"


def _why_unknown(compression: Lossy) -> str | None:
    """Return why the kernels do not support a code in all bits that it may use; None: they do."""
    if isinstance(compression, Eden):
        size = compression.bucket_size
        few = f"the kernels rotate up to {MOST_ROTATED} elements, and bucket_size is {size}"
        return few if size > MOST_ROTATED else None
    if not isinstance(compression, Qsgd):
        return f"the kernels do not support {type(compression).__name__}"
    rules = [rule.bits for rule in as_rules(compression.rules)]
    fewest = min([compression.coding().spec.bits, *rules])
    return f"the kernels code in {FEWEST_BITS} bits or more" if fewest < FEWEST_BITS else None


def by_code(
    items: Iterable[tuple[_core.CodecSpec | None, T]],
) -> list[tuple[_core.CodecSpec, list[T]]]:
    """Return the items of each code, for one kernel launch; items without a code are dropped."""
    groups: list[tuple[_core.CodecSpec, list[T]]] = []
    for spec, item in items:
        if spec is None:
            continue
        same_code = next((them for other, them in groups if other == spec), None)
        if same_code is None:
            same_code = []
            groups.append((spec, same_code))
        same_code.append(item)
    return groups


def uploaded(table: NDArray[np.uint64], device: torch.device) -> torch.Tensor:
    """Copy a kernels' table to the device's memory."""
    return torch.from_numpy(table.view("int64")).to(device)
