"""The collectives of toyframe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qsgd_hpc.toyframe._tensors import TENSORS

from qsgd_hpc.frameworks import eager
from qsgd_hpc.frameworks.compressors import NoneCompressor
from qsgd_hpc.frameworks.reduction import Reduction
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Average, Op
from qsgd_hpc.runtime.process_sets import ProcessSet, global_process_set
from toyframe import Tensor


def _reduction(
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Any = NoneCompressor,
) -> Reduction:
    return Reduction(op, prescale_factor, postscale_factor, process_set, compression)


def grouped_allreduce(
    tensors: Sequence[Tensor], name: str | None = None, **options: Any
) -> list[Tensor]:
    reduction = _reduction(**options)
    name = ops.label("allreduce", name, reduction.process_set)
    made: list[Tensor] = eager.start_allreduces(
        TENSORS, tensors, reduction, name, grouped=True
    ).wait()
    return made


def allreduce(tensor: Tensor, **options: Any) -> Tensor:
    return grouped_allreduce([tensor], **options)[0]


def grouped_reducescatter(tensors: Sequence[Tensor], **options: Any) -> list[Tensor]:
    reduction = _reduction(**options)
    name = ops.label("reducescatter", None, reduction.process_set)
    made: list[Tensor] = eager.start_reducescatters(
        TENSORS, tensors, reduction, name, grouped=True
    ).wait()
    return made


def reducescatter(tensor: Tensor, **options: Any) -> Tensor:
    return grouped_reducescatter([tensor], **options)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    name = ops.label("allgather", None, process_set)
    made = eager.start_allgathers(TENSORS, tensors, name, process_set, grouped=True).wait()
    return [gathered for gathered, _ in made]


def allgather(tensor: Tensor, process_set: ProcessSet = global_process_set) -> Tensor:
    return grouped_allgather([tensor], process_set)[0]


def broadcast(
    tensor: Tensor, root_rank: int, process_set: ProcessSet = global_process_set
) -> Tensor:
    name = ops.label("broadcast", None, process_set)
    made: Tensor = eager.start_broadcast(
        TENSORS, tensor, root_rank, name, process_set, in_place=False
    ).wait()
    return made


def alltoall(
    tensor: Tensor, splits: Tensor | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    name = ops.label("alltoall", None, process_set)
    rows = None if splits is None else splits.tolist()
    made, received = eager.start_alltoall(TENSORS, tensor, rows, name, process_set).wait()
    return made if splits is None else (made, Tensor(received, splits.dtype))
