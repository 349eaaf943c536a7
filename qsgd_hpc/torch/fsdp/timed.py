"""Times of FSDP2's collectives in host memory, for a scaling study.

In host memory, they run when they are called, and nothing is computed meanwhile. On a device, they
are queued, and the host cannot measure when they run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from qsgd_hpc.rules import PLAIN_BITS
from qsgd_hpc.torch.fsdp.collectives import QSGDAllGather, QSGDReduceScatter
from qsgd_hpc.torch.fsdp.layout import before_first_gathering, param_groups, sharded_modules

__all__ = ["time_shards"]

Note = Callable[[float, int, int, int | None], None]
_KNOWN = (DefaultAllGather, DefaultReduceScatter, QSGDAllGather, QSGDReduceScatter)


class _Timed:
    """A collective that reports the duration of each of its calls."""

    def __init__(self, collective: Any, note: Note) -> None:
        self.allocate = collective.allocate
        self._collective = collective
        self._reduces = isinstance(collective, (DefaultReduceScatter, QSGDReduceScatter))
        self._note = note
        compression = getattr(collective, "compression", None)
        self._bits = PLAIN_BITS if compression is None else compression.bits

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        traffic = getattr(self._collective, "traffic", None)  # of coded collectives
        before = traffic.sent if traffic else 0
        begin_s = time.perf_counter()
        result = self._collective(output_tensor, input_tensor, *args, **kwargs)
        if output_tensor.is_cpu:
            seconds = time.perf_counter() - begin_s
            # The larger tensor has all ranks' shards, the smaller only this rank's.
            others = abs(output_tensor.nbytes - input_tensor.nbytes)
            sent = traffic.sent - before if traffic else others
            self._note(seconds, sent, input_tensor.nbytes if self._reduces else 0, self._bits)
        return result


def time_shards(module: Any, note: Note) -> None:
    """Report the durations of the collectives of an outermost module and the modules in it.

    Args:
        module: a module that ``fully_shard`` was called on.
        note: called after each collective with its seconds, the bytes that this rank has sent to
            others, the bytes of gradients that it has reduced, and the bits per element.
    """

    def replace(module: Any) -> None:
        for each in sharded_modules(module).values():
            for group in param_groups(each):
                for name in ("_all_gather_comm", "_reduce_scatter_comm"):
                    collective = getattr(group, name)
                    if isinstance(collective, _KNOWN):
                        setattr(group, name, _Timed(collective, note))

    before_first_gathering(module, replace)
