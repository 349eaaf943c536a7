"""Marks of a single rank's steps, for a scaling study."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from qsgd_hpc.frameworks.step_mark import mark_name, marks_steps, smallest
from qsgd_hpc.runtime.ops import Sum
from qsgd_hpc.torch.ops import allreduce_

__all__ = ["mark_step"]


@torch.no_grad()
def mark_step(gradients: Iterable[torch.Tensor | None], name: str) -> None:
    """Report a single rank's step to the engine; see :mod:`qsgd_hpc.frameworks.step_mark`.

    Args:
        gradients: the gradients of the step.
        name: name of the operation, different for each optimizer.
    """
    if not marks_steps():
        return
    given = [g._values() if g.is_sparse else g for g in gradients if g is not None]
    if given:
        mark = given[smallest([g.numel() for g in given])]
        allreduce_(mark.detach(), op=Sum, name=mark_name(name))
