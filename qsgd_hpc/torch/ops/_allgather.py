"""``allgather``: the rows of all ranks, concatenated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qsgd_hpc.frameworks.eager import start_allgathers
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Average, Handle, Op
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.torch.ops._alltoall import Alltoall
from qsgd_hpc.torch.ops._gradients import Collective, run
from qsgd_hpc.torch.ops._tensors import TENSORS

__all__ = ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]

Tensors = Sequence[torch.Tensor]


class Allgather(Collective):
    """An allgather of tensors; only their numbers of rows may differ between ranks.

    Args:
        op: the reduction of the ranks' gradients: Average, as scripts of this API expect, or
            Sum, if it is part of the derivative of another operation.
    """

    kind = "allgather"

    def __init__(
        self, name: str | None, process_set: ProcessSet, *, grouped: bool, op: Op = Average
    ) -> None:
        super().__init__(name, process_set, grouped=grouped)
        self._op = op
        self._rows: list[list[int]] = []

    def start(self, tensors: Tensors) -> Handle:
        """Start gathering into new tensors."""
        handle = start_allgathers(
            TENSORS, tensors, self._name, self._process_set, grouped=self._grouped
        )
        return handle.then(self._without_rows)

    def _without_rows(self, made: list[tuple[torch.Tensor, list[int]]]) -> list[torch.Tensor]:
        self._rows = [rows for _, rows in made]
        return [gathered for gathered, _ in made]

    def gradient(self, index: int, gradient: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        """Return the mean, or sum, over the ranks of the gradients of this rank's rows."""
        rows = self._rows[index]
        mine = ops.position_in(self._process_set)
        call = Alltoall(rows, self.gradient_name(index), self._process_set)
        parts = run(call, [gradient])[0].reshape(len(rows), rows[mine], *gradient.shape[1:])
        return parts.mean(0) if self._op is Average else parts.sum(0)


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an ``allgather``; ``synchronize`` returns its result."""
    handle = Allgather(name, process_set, grouped=False).start([tensor])
    return handle.then(lambda made: made[0])


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return every rank's ``tensor``, concatenated in rank order.

    Its gradient is this rank's rows of the mean of the ranks' output gradients.

    Args:
        tensor: any dtype; ranks may differ in the first dimension only. Scalars count as
            one row each.
        name: pairs the calls of the ranks; default: by order.
        process_set: the participating ranks; default: all.
    Raises:
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    return run(Allgather(name, process_set, grouped=False), [tensor])[0]


def grouped_allgather_async(
    tensors: Tensors,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a ``grouped_allgather``; ``synchronize`` returns its results."""
    return Allgather(name, process_set, grouped=True).start(tensors)


def grouped_allgather(
    tensors: Tensors,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Gather several tensors, which complete or fail together; see :func:`allgather`."""
    return run(Allgather(name, process_set, grouped=True), tensors)
