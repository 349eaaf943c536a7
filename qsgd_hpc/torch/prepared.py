"""Reductions of one parameter's gradients, prepared in the first step and reused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from qsgd_hpc.frameworks.compressors import NoneCompressor
from qsgd_hpc.frameworks.eager import start_allreduce
from qsgd_hpc.frameworks.reduction import GradientReduction, compressor_of
from qsgd_hpc.frameworks.step_mark import mark_name, marks_steps, smallest
from qsgd_hpc.runtime import basics
from qsgd_hpc.runtime.ops import Group, Handle, Operation, Sum
from qsgd_hpc.torch.ops import allreduce_
from qsgd_hpc.torch.ops._tensors import (
    TENSORS,
    current_stream,
    current_stream_of,
    device_of,
    name_of,
    used_here,
)

__all__ = ["GradientAllreduce", "ParameterGradient", "mark_step"]


class GradientAllreduce:
    """The in-place reduction of one parameter's gradients.

    Args:
        name: name of the operation, equal on every rank.
        parameter: the parameter's name, for rules of compression.
        shape: shape of the gradients.
        dtype: type of the gradients.
        reduction: the reduction.
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
        self._reduction = reduction
        if dtype.is_complex:  # sent as pairs of floats, uncompressed
            self._reduction = replace(reduction, compression=NoneCompressor)
        self._in_place = (
            compressor_of(reduction.compression) is NoneCompressor and not dtype.is_complex
        )
        self.device = -1
        """The device whose gradients are reduced without a copy; -1: the host."""
        self._device_index: int | None = None
        self._readable = False
        self._operation: Operation | None = None
        self._group: Group | None = None
        self.coding = reduction.coding(parameter, shape, name_of(dtype))

    def operation_on(
        self, gradient: torch.Tensor, device_index: int, group: Group | None = None
    ) -> Operation | None:
        """Return the operation for a gradient in its memory; None if that is not possible.

        ``device_index`` is the gradient's ``get_device()``.
        """
        # Minimal Python: this runs for every parameter in every step.
        if device_index != self._device_index:
            self._move_to(gradient)
        if not (
            self._readable
            and self.fits(gradient)
            and not gradient.is_sparse
            and gradient.is_contiguous()
        ):
            return None
        if self._operation is None or group != self._group:
            self._group = group
            self._operation = self._reduction.operation(
                self._name, self.coding, group, shape=self._shape, dtype=name_of(self.dtype)
            )
        return self._operation

    def fits(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient has the type and shape that this reduces.

        A script may have given the parameter other data, such as more rows of an embedding.
        """
        return gradient.dtype == self.dtype and gradient.shape == self._shape

    def _move_to(self, gradient: torch.Tensor) -> None:
        """Determine how gradients on this gradient's device are reduced."""
        device = device_of(gradient)
        self._device_index = gradient.get_device()
        self._readable = self._in_place and device is not None
        self.device = -1 if device is None else device

    def start(self, gradient: torch.Tensor, group: Group | None = None) -> Any:
        """Start replacing a gradient by its reduction; do not access it before the handle is done.

        On a device, the gradient must be ready after the current stream's work submitted so far.
        Gradients of one group complete together. A gradient with NaN or Inf is also delivered,
        before the handle's ``wait`` raises. Returns an object with a ``wait``.
        """
        operation = self.operation_on(gradient, gradient.get_device(), group)
        if operation is None:
            return self._start_converted(gradient, group)
        pointer, stream = gradient.data_ptr(), current_stream_of(gradient)
        return basics.context().engine.start(
            operation, pointer, pointer, gradient, False, self.device, stream
        )

    def _start_converted(self, gradient: torch.Tensor, group: Group | None) -> Handle:
        """Start reducing a gradient that needs a compressor, a copy, or another layout or type."""
        if gradient.is_conj():  # autograd conjugates lazily; its memory holds other values
            values = gradient.resolve_conj()
            handle = self._start_converted(values, group)
            return handle.then(lambda _: gradient.detach().copy_(used_here(values)))
        return start_allreduce(
            TENSORS,
            torch.view_as_real(gradient) if gradient.is_complex() else gradient,
            self._reduction,
            self._name,
            group,
            coding=self.coding,
            check_finite=True,
            in_place=True,
        )


def _is_part(gradient: torch.Tensor) -> bool:
    """Return whether other tensors may share the gradient's memory, and thus its ``_version``.

    torch does not call gradients views if a backward pass made them, such as that of ``torch.cat``.
    """
    if gradient._is_view():
        return True
    return not gradient.is_sparse and gradient.untyped_storage().nbytes() > gradient.nbytes


class ParameterGradient:
    """The state that an optimizer keeps for one parameter's gradients.

    Dictionaries hash it by identity, which is faster than a tensor's hash, which calls Python code.
    """

    __slots__ = (
        "allreduce", "device_index", "group", "latest", "name", "nbytes", "parameter", "passes",
        "sparse_dim", "stream", "version",
    )  # fmt: skip

    def __init__(self, parameter: torch.Tensor, name: str) -> None:
        self.parameter = parameter
        self.name = name
        self.nbytes = parameter.nbytes
        self.passes = 0
        """Number of backward passes since the last step that have added to the gradient."""
        self.group: Sequence[ParameterGradient] | None = None
        """The gradients that are reduced together with this one, which is among them."""
        self.allreduce: GradientAllreduce | None = None
        self.sparse_dim: int | None = None
        """Sparse dimensions of its gradients, 0 if dense; None if no rank has had one so far."""
        self.latest: torch.Tensor | None = None
        """The gradient of this step as of the end of the latest backward pass."""
        self.version = 0
        """Number of changes of ``latest`` until then, as autograd counts them."""
        self.device_index = -1
        """Its ``get_device()``."""
        self.stream = 0
        """The stream of its device whose work so far computes it."""

    def read(self) -> torch.Tensor:
        """Store the current gradient, and return it."""
        gradient = self.latest = self.parameter.grad
        assert gradient is not None
        self.version = gradient._version
        device_index = self.device_index = gradient.get_device()
        if device_index >= 0:
            self.stream = current_stream(device_index)
        return gradient

    @property
    def changed(self) -> bool:
        """Whether the gradient was written to since its backward pass, other than by the core."""
        latest = self.latest
        return latest is not None and latest._version != self.version and not _is_part(latest)

    def in_its_stream(self) -> AbstractContextManager[Any]:
        """Return a context whose GPU work follows the work that computed the gradient."""
        gradient = self.gradient
        if not gradient.is_cuda or current_stream_of(gradient) == self.stream:
            return nullcontext()
        external: Any = torch.cuda.ExternalStream
        if self.stream:
            return torch.cuda.stream(external(self.stream, gradient.device))
        # The default stream's address is 0, for which ExternalStream creates a new stream.
        return torch.cuda.stream(torch.cuda.default_stream(gradient.device))

    @property
    def gradient(self) -> torch.Tensor:
        """Return the gradient as of its completion."""
        return self.read() if self.latest is None else self.latest

    def complete(self) -> None:
        """Use the current gradient, or zeros if this rank has none."""
        if self.parameter.grad is None:
            self.parameter.grad = self._zeros()
        self.read()

    def _zeros(self) -> torch.Tensor:
        parameter, sparse_dim = self.parameter, self.sparse_dim
        if not sparse_dim:
            return torch.zeros_like(parameter)
        shape, device = parameter.shape, parameter.device
        return torch.sparse_coo_tensor(
            torch.empty((sparse_dim, 0), dtype=torch.int64, device=device),
            torch.empty((0, *shape[sparse_dim:]), dtype=parameter.dtype, device=device),
            shape,
            check_invariants=False,
        )

    def replace(self, gradient: torch.Tensor, reduced: torch.Tensor) -> None:
        """Replace a gradient by a new tensor, unless the script has replaced it."""
        if self.parameter.grad is gradient:
            self.parameter.grad = self.latest = reduced


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
