"""Allgather and alltoall of torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qsgd_hpc.frameworks.eager import start_allgathers, start_alltoall
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Average, Handle, Op
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.torch.ops._gradients import Collective, run
from qsgd_hpc.torch.ops._tensors import TENSORS

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "grouped_allgather",
    "grouped_allgather_async",
]

Tensors = Sequence[torch.Tensor]
Splits = Sequence[int] | torch.Tensor | None


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


class Alltoall(Collective):
    """An alltoall that sends ``splits[i]`` rows to the i-th rank of the process set."""

    kind = "alltoall"

    def __init__(self, splits: Splits, name: str | None, process_set: ProcessSet) -> None:
        super().__init__(name, process_set)
        self._splits = splits.tolist() if isinstance(splits, torch.Tensor) else splits
        self.received: list[int] = []
        """Number of rows received from each rank, once it is done."""

    def start(self, tensors: Tensors) -> Handle:
        """Start exchanging the rows of one tensor."""
        (tensor,) = tensors
        handle = start_alltoall(TENSORS, tensor, self._splits, self._name, self._process_set)
        return handle.then(self._without_rows)

    def _without_rows(self, made: tuple[torch.Tensor, list[int]]) -> list[torch.Tensor]:
        exchanged, self.received = made
        return [exchanged]

    def gradient(self, index: int, gradient: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        """Send the gradient back to the ranks of the rows."""
        back = Alltoall(self.received, self.gradient_name(index), self._process_set)
        return run(back, [gradient])[0]


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an ``alltoall``; ``synchronize`` returns its result."""
    call = Alltoall(splits, name, process_set)
    return call.start([tensor]).then(lambda made: _with_splits(made[0], call, splits))


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send some rows of ``tensor`` to each rank; return the received rows, in rank order.

    Its gradient is the output gradient, sent back to the ranks of the rows.

    Args:
        tensor: at least one dimension; ranks may differ in the first one only.
        splits: number of rows for each rank of the process set, as a list or tensor; None
            sends the same number to each.
        name: pairs the calls of the ranks; default: by order.
        process_set: the participating ranks; default: all.
    Returns:
        The rows and, if ``splits`` were passed, the number of rows from each rank: int32, on the
        device of ``splits`` if that is a tensor, else on the CPU.
    Raises:
        UsageError: the sum of splits is not the number of rows (a ValueError, on this rank).
        HorovodInternalError: the ranks' tensors do not match, or a rank died.
    """
    call = Alltoall(splits, name, process_set)
    return _with_splits(run(call, [tensor])[0], call, splits)


def _with_splits(
    made: torch.Tensor, call: Alltoall, splits: Splits
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if splits is None:
        return made
    place = splits.device if isinstance(splits, torch.Tensor) else None
    return made, torch.tensor(call.received, dtype=torch.int32, device=place)
