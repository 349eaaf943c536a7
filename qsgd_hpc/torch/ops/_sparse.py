"""The sum of sparse tensors: their entries, gathered from all ranks."""

from __future__ import annotations

import torch

from qsgd_hpc.errors import HorovodInternalError, UsageError
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Average, Handle, Op, Sum
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from qsgd_hpc.torch.ops._allgather import Allgather

__all__ = ["sparse_allreduce_async"]


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start reducing a sparse tensor; ``synchronize`` returns a new, coalesced one.

    Each rank's entries are sent, so this is efficient if ranks have few and different entries.

    Args:
        tensor: ``torch.sparse_coo``; shapes must be equal; the numbers of entries may differ.
        name: pairs the calls of the ranks; default: by order.
        op: Average or Sum.
        process_set: the participating ranks; default: all.
    Raises:
        UsageError: the tensor is dense, or another ``op``.
    """
    if tensor.layout is not torch.sparse_coo:
        raise UsageError(
            f"sparse_allreduce of a {tensor.layout} tensor: pass tensor.to_sparse_coo(), or reduce "
            "it with hvd.allreduce"
        )
    if op not in (Average, Sum):
        raise UsageError(f"sparse_allreduce(op={op!r}): choose hvd.Average or hvd.Sum")
    mine = tensor.detach().coalesce()
    text = f"sparse.{ops.label('sparse', name, process_set)}"
    gather = Allgather(text, process_set, grouped=True)

    def merged(gathered: list[torch.Tensor]) -> torch.Tensor:
        indices, values, shapes = gathered
        _require_equal(name or text, shapes.tolist(), ops.ranks_of(process_set))
        # No check needed: every rank's indices are within its shape, and all shapes are equal.
        entries = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)
        total = entries.coalesce()
        return total / len(shapes) if op is Average else total

    # Reading it does not wait for a device.
    shape = torch.tensor([tensor.shape], device="cpu")
    return gather.start([mine.indices().t(), mine.values(), shape]).then(merged)


def _require_equal(name: str, shapes: list[list[int]], ranks: list[int]) -> None:
    for rank, shape in zip(ranks, shapes, strict=True):
        if shape != shapes[0]:
            raise HorovodInternalError(
                f"sparse tensor '{name}': rank {rank} has shape {shape}, rank {ranks[0]} has "
                f"{shapes[0]}. Every rank must submit equal shapes."
            )
