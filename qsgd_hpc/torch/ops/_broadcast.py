"""``broadcast``: copies one rank's tensor to all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qsgd_hpc.frameworks.eager import start_broadcast
from qsgd_hpc.frameworks.reduction import Reduction
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.runtime.ops import Average, Handle
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.torch.ops._gradients import Collective, run
from qsgd_hpc.torch.ops._reduced import Allreduce
from qsgd_hpc.torch.ops._tensors import TENSORS

__all__ = ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]

Tensors = Sequence[torch.Tensor]


class _Broadcast(Collective):
    kind = "broadcast"

    def __init__(self, root_rank: int, name: str | None, process_set: ProcessSet) -> None:
        super().__init__(name, process_set)
        self._root = root_rank

    def start(self, tensors: Tensors) -> Handle:
        (tensor,) = tensors
        handle = start_broadcast(
            TENSORS, tensor, self._root, self._name, self._process_set, in_place=False
        )
        return handle.then(lambda received: [received])

    def gradient(self, index: int, gradient: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        """Return the mean of all ranks' gradients on the root, else 0."""
        reduction = Reduction(Average, process_set=self._process_set)
        average = Allreduce(reduction, self.gradient_name(index), grouped=False)
        (mean,) = run(average, [gradient])
        if basics.rank() == self._root:
            return mean
        # Zeros that depend on the mean, so that a second derivative is collective as on the root.
        return mean.masked_fill(torch.ones_like(mean, dtype=torch.bool), 0)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start replacing ``tensor`` by root_rank's; do not access it before ``synchronize``."""
    text = ops.label("broadcast", name, process_set)
    return start_broadcast(TENSORS, tensor, root_rank, text, process_set, in_place=True)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a broadcast; ``synchronize`` returns root_rank's tensor as a new one."""
    text = ops.label("broadcast", name, process_set)
    return start_broadcast(TENSORS, tensor, root_rank, text, process_set, in_place=False)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Replace ``tensor`` by root_rank's; shapes must be equal."""
    received: torch.Tensor
    received = ops.run_now(broadcast_async_, tensor, root_rank, name, process_set)
    return received


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return root_rank's ``tensor``; shapes must be equal.

    Its gradient is the mean of the ranks' output gradients on the root, zeros on the others.

    Args:
        tensor: any dtype; unchanged.
        root_rank: a rank of the job that is in the process set.
        name: pairs the calls of the ranks; default: by order.
        process_set: the participating ranks; default: all.
    Raises:
        UsageError: root_rank is not in the set.
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    return run(_Broadcast(root_rank, name, process_set), [tensor])[0]
