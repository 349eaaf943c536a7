"""The GPU kernels for torch.distributed's tensors: which of them they can code, and on what stream.

Gradients of DDP and shards of FSDP2 are coded where they are, and carried by their group.
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
from qsgd_hpc.torch._groups import why_not_carried

__all__ = ["by_code", "serves", "stream_of", "uploaded", "why_on_host"]

FEWEST_BITS = 2  # of QSGD's that the kernels know
MOST_ROTATED = 512  # elements of one of EDEN's buckets

T = TypeVar("T")


def serves(device: torch.device, compression: Lossy, group: Any) -> str | None:
    """Return the kernels that can code a device's tensors for the group; None: the host must.

    They know QSGD's own code and EDEN's, and the group must carry the device's memory, as NCCL
    does.
    """
    return gpu.library() if why_on_host(device, compression, group) is None else None


def why_on_host(device: torch.device, compression: Lossy, group: Any) -> str | None:
    """Return why a device's tensors are coded in host memory; None: they stay where they are."""
    library = gpu.library()
    if library is None or gpu.device_type(library) != device.type:
        return f"this installation has no kernels for {device.type}"
    unknown = _why_unknown(compression) or why_not_carried(group, device)
    if unknown or gpu.serves(device.index or 0):
        return unknown
    return f"the kernels of this installation do not work on {device}"


def _why_unknown(compression: Lossy) -> str | None:
    """Return what the kernels lack for this code in all bits that it may take; None: nothing."""
    if isinstance(compression, Eden):
        size = compression.bucket_size
        few = f"its kernels rotate up to {MOST_ROTATED} elements, and bucket_size is {size}"
        return few if size > MOST_ROTATED else None
    if not isinstance(compression, Qsgd):
        return f"its kernels do not know {type(compression).__name__}"
    rules = [rule.bits for rule in as_rules(compression.rules)]
    fewest = min([compression.coding().spec.bits, *rules])
    return f"its kernels code in {FEWEST_BITS} bits or more" if fewest < FEWEST_BITS else None


def by_code(
    items: Iterable[tuple[_core.CodecSpec | None, T]],
) -> list[tuple[_core.CodecSpec, list[T]]]:
    """Return what has each code, for one launch; what has none is left out."""
    groups: list[tuple[_core.CodecSpec, list[T]]] = []
    for spec, item in items:
        if spec is None:
            continue
        alike = next((them for other, them in groups if other == spec), None)
        if alike is None:
            alike = []
            groups.append((spec, alike))
        alike.append(item)
    return groups


def stream_of(device: torch.device) -> int:
    """Return the device's current stream, for kernels."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def uploaded(table: NDArray[np.uint64], device: torch.device) -> torch.Tensor:
    """Return a table of the kernels in the device's memory."""
    return torch.from_numpy(table.view("int64")).to(device)
