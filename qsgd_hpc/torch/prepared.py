"""The allreduce of one parameter's gradients: what is equal in every step is worked out once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from qsgd_hpc import basics, ops
from qsgd_hpc._base.compressors import NoneCompressor
from qsgd_hpc._base.eager import start_allreduce
from qsgd_hpc._base.gradient_reduction import GradientReduction
from qsgd_hpc.ops import Group, Handle, Operation
from qsgd_hpc.torch.ops._tensors import TENSORS, name_of

__all__ = ["GradientAllreduce"]


class GradientAllreduce:
    """Reduces the gradients of one parameter in place.

    Args:
        name: of the operation, equal on every rank.
        parameter: the name that rules for compression look at.
        shape: of the gradients.
        dtype: of the gradients.
        reduction: what to do.
    """

    def __init__(
        self,
        name: str,
        parameter: str,
        shape: torch.Size,
        dtype: torch.dtype,
        reduction: GradientReduction,
    ) -> None:
        self.dtype = dtype
        self._shape = shape
        self._name = name
        self._reduction = reduction.of_tensor()
        if dtype.is_complex:  # travels as pairs of floats, as they are
            self._reduction = replace(self._reduction, compression=NoneCompressor)
        self._in_place = reduction.compressor is NoneCompressor and not dtype.is_complex
        self._operation: Operation | None = None
        self._group: Group | None = None
        self._coding = reduction.coding(parameter, shape, name_of(dtype))

    def start(self, gradient: torch.Tensor, group: Group | None = None) -> Any:
        """Start replacing a gradient by its reduction; do not touch it before the handle is done.

        Gradients of one group become ready, and are done, together. A gradient that holds NaN or
        Inf is delivered, too, before the wait of its handle raises. Returns something with a
        ``wait``.
        """
        # As little Python as can be: this runs for every parameter in every step.
        if not (self._in_place and gradient.is_cpu and gradient.is_contiguous()):
            return self._start_by_way(gradient, group)
        if self._operation is None or group != self._group:
            self._group = group
            self._operation = self._described(group)
        pointer = gradient.data_ptr()
        return basics.context().engine.start(self._operation, pointer, pointer, gradient)

    def _described(self, group: Group | None) -> Operation:
        reduction = self._reduction
        return ops.operation(
            "allreduce",
            f"allreduce.{self._name}",
            reduction.process_set,
            shape=self._shape,
            dtype=name_of(self.dtype),
            op=reduction.op,
            prescale=reduction.prescale,
            postscale=reduction.postscale,
            coding=self._coding,
            lasting=True,
            check_finite=True,
            group=group,
        )

    def _start_by_way(self, gradient: torch.Tensor, group: Group | None) -> Handle:
        """Start it on what a compressor, the device or the layout makes of the gradient."""
        return start_allreduce(
            TENSORS,
            torch.view_as_real(gradient) if gradient.is_complex() else gradient,
            self._reduction,
            self._name,
            group,
            coding=self._coding,
            check_finite=True,
            in_place=True,
        )
