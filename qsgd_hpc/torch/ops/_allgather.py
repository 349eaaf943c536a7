"""``allgather``: every rank's rows, one below the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qsgd_hpc import basics, ops
from qsgd_hpc.ops import Handle
from qsgd_hpc.process_sets import ProcessSet, global_process_set
from qsgd_hpc.torch.ops._alltoall import Alltoall
from qsgd_hpc.torch.ops._gradients import Collective, run
from qsgd_hpc.torch.ops._tensors import moved_buffer_of, on_host, tensor_from

__all__ = [
    "Allgather",
    "allgather",
    "allgather_async",
    "grouped_allgather",
    "grouped_allgather_async",
]

Tensors = Sequence[torch.Tensor]


class Allgather(Collective):
    """Gathers tensors, of which only the numbers of rows may differ between ranks."""

    def __init__(self, name: str | None, process_set: ProcessSet, *, grouped: bool) -> None:
        self._name = ops.label("allgather", name, process_set)
        self._process_set = process_set
        self._grouped = grouped
        self._rows: dict[int, list[int]] = {}

    def start(self, tensors: Tensors) -> Handle:
        """Start gathering into new tensors."""
        hosts = [on_host(t.reshape(1) if t.dim() == 0 else t) for t in tensors]
        if not self._grouped:
            handle = self._start(hosts[0], tensors[0], self._name, 0, None)
            return handle.then(lambda gathered: [gathered])
        group = ops.Group(self._name, len(hosts))
        names = ops.member_names(self._name, len(hosts))
        members = zip(hosts, tensors, names, strict=True)
        return Handle.together(
            [self._start(host, t, name, i, group) for i, (host, t, name) in enumerate(members)]
        )

    def _start(
        self,
        host: torch.Tensor,
        tensor: torch.Tensor,
        name: str,
        index: int,
        group: ops.Group | None,
    ) -> Handle:
        def gathered(received: ops.Received) -> torch.Tensor:
            self._rows[index] = received.rows
            return tensor_from(received, host).to(tensor.device)

        return ops.allgather(
            moved_buffer_of(host),
            name=name,
            process_set=self._process_set,
            group=group,
            result=gathered,
        )

    def gradients(self, gradients: Tensors, values: Tensors) -> Tensors:
        """Return the sum over the ranks of what they hold for this rank's rows."""
        mine = ops.ranks_of(self._process_set).index(basics.rank())
        shares = []
        for index, gradient in enumerate(gradients):
            rows = self._rows[index]
            call = Alltoall(rows, f"{self._name}.gradient.{index}", self._process_set)
            share = run(call, [gradient])[0]
            shares.append(share.reshape(len(rows), rows[mine], *gradient.shape[1:]).sum(0))
        return shares


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
    """Return every rank's ``tensor``, one below the other in rank order.

    Args:
        tensor: any dtype; the ranks' may differ in the first dimension only. Scalars count as
            one row each.
        name: pairs the calls of the ranks; by default their order does.
        process_set: the ranks that take part; by default all.
    Raises:
        HorovodInternalError: the ranks' tensors do not fit each other, or a rank died.
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
