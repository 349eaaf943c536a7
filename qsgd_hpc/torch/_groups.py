"""Functions of torch.distributed that torch 2.13 has given other names."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single"]

_NEW = hasattr(dist, "all_gather_single")
all_gather_single: Any = dist.all_gather_single if _NEW else dist.all_gather_into_tensor
reduce_scatter_single: Any = dist.reduce_scatter_single if _NEW else dist.reduce_scatter_tensor
