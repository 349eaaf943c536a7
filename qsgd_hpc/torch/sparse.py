"""Sparse gradients, such as those of an embedding with ``sparse=True``, and missing ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from qsgd_hpc import env
from qsgd_hpc.errors import NonFiniteGradientError
from qsgd_hpc.frameworks.gradient_reduction import GradientReduction
from qsgd_hpc.runtime import basics, ops
from qsgd_hpc.torch.prepared import ParameterGradient

__all__ = ["Layouts", "refuse_nonfinite"]


class Layouts:
    """The agreement of all ranks on which parameters have sparse gradients.

    A rank without a gradient for a parameter contributes an empty (sparse) or a zero (dense) one,
    so it needs the layout from the others. Therefore the ranks compare layouts at the end of each
    step until every parameter has had a gradient on some rank: usually once. Until then, the
    parameter is not reduced, and keeps no gradient, as in one process. A rank that has joined
    misses comparisons, so all ranks start again after a join.

    Args:
        name: name of the comparison, equal on every rank.
        reduction: reduction of the gradients.
        known: all gradients of the optimizer, including those that are not compared now.
    """

    def __init__(
        self, name: str, reduction: GradientReduction, known: Mapping[int, ParameterGradient]
    ) -> None:
        self._name = name
        self._process_set = reduction.process_set
        self._known = known
        self._joins = basics.joins()

    def compare(
        self,
        gradients: Sequence[ParameterGradient],
        is_due: Callable[[ParameterGradient], bool],
    ) -> Sequence[ParameterGradient]:
        """Compare the layouts of all ranks; collective, with equal parameters on every rank.

        Args:
            gradients: the gradients of this step.
            is_due: whether the reduction of a gradient may have started.
        Returns:
            Those that some rank has had in this or an earlier step, equal on every rank.
        """
        if self._joins != basics.joins():
            self._joins = basics.joins()
            for each in self._known.values():
                each.sparse_dim = None
        unknown = [each for each in gradients if each.sparse_dim is None]
        if not unknown:
            return gradients
        for each in unknown:
            # The script may have discarded it, but its reduction needs every rank.
            each.latest = each.latest if is_due(each) else each.parameter.grad
        seen = np.array([_layout(each.latest) for each in unknown], np.int64)
        # By a sum, to which a joined rank can contribute zeros.
        ops.reduce_array(seen, self._name, ops.Sum, process_set=self._process_set, lasting=False)
        for each, (dense, sparse, dims) in zip(unknown, seen.tolist(), strict=True):
            each.sparse_dim = dims // sparse if sparse else 0 if dense else None
        return [each for each in gradients if each.sparse_dim is not None]


def _layout(gradient: torch.Tensor | None) -> tuple[int, int, int]:
    """Return whether a gradient is dense, whether it is sparse, and its sparse dimensions."""
    if gradient is None:
        return 0, 0, 0
    return (0, 1, gradient.sparse_dim()) if gradient.is_sparse else (1, 0, 0)


def refuse_nonfinite(gradient: torch.Tensor, name: str) -> None:
    """Apply QSGD_NONFINITE to a gradient with NaN or Inf, on every rank.

    Raises:
        NonFiniteGradientError: unless QSGD_NONFINITE allows such gradients.
    """
    what = env.get("QSGD_NONFINITE")
    if what == "propagate" or gradient.values().isfinite().all():
        return
    fault = (
        f"the sparse gradient of {name!r} holds NaN or Inf after all ranks' entries were added. "
        "Lower the learning rate or scale the loss; QSGD_NONFINITE"
    )
    if what == "error":
        raise NonFiniteGradientError(f"{fault}=warn or =propagate lets training go on")
    if basics.rank() == 0:
        warnings.warn(f"{fault}=error would end the training", stacklevel=2)  # shown once
