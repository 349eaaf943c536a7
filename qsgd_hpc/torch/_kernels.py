"""GPU kernels for torch.distributed's tensors: supported codes and devices.

Gradients of DDP and shards of FSDP2 are coded on their device, and sent by their process group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from qsgd_hpc import _core
from qsgd_hpc.compression import Eden, Lossy, Qsgd
from qsgd_hpc.rules import as_rules
from qsgd_hpc.runtime import gpu
from qsgd_hpc.torch._groups import why_unsupported

__all__ = ["by_code", "serves", "uploaded", "why_on_host"]

FEWEST_BITS = 2  # fewest bits of QSGD that the kernels support
MOST_ROTATED = 512  # largest bucket of EDEN, in elements

T = TypeVar("T")


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
