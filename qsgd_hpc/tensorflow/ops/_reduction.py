"""Reductions of TensorFlow's tensors, with conversions of their types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from qsgd_hpc._core import Coding
from qsgd_hpc.compression import Lossy
from qsgd_hpc.frameworks.compressors import NoneCompressor
from qsgd_hpc.frameworks.reduction import CURVED, Reduction, coding_for, is_widened, op_for
from qsgd_hpc.runtime import ops
from qsgd_hpc.runtime.ops import Op
from qsgd_hpc.tensorflow.ops._names import full_name
from qsgd_hpc.tensorflow.ops._run import run

__all__ = ["names_and_group", "reduce_all"]


class _Widened:
    """A compressor that sends integers as int64, whose sum does not wrap before the division."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tf.cast(tensor, tf.int64), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        return tf.cast(tensor, context)


@dataclass(frozen=True)
class _Prepared:
    """One tensor in the form in which it is sent."""

    to_send: tf.Tensor
    compressor: Any
    context: Any
    op: Op
    prescale: float
    postscale: float
    factor: float
    """Factor by which TensorFlow multiplies the result."""
    coding: Coding | None

    def finish(self, reduced: tf.Tensor) -> tf.Tensor:
        back = self.compressor.decompress(reduced, self.context)
        return back if self.factor == 1 else back * tf.cast(self.factor, back.dtype)


def _prepare(tensor: tf.Tensor, reduction: Reduction, coding: Coding | None) -> _Prepared:
    op = op_for(reduction.op, tensor.dtype.name, reduction.prescale, reduction.postscale)
    compressor = NoneCompressor if isinstance(reduction.compression, Lossy) else (
        reduction.compression
    )  # fmt: skip
    if is_widened(tensor.dtype.name, op):
        compressor = _Widened
    pre, post, factor = reduction.prescale, reduction.postscale, 1.0
    if op in CURVED and tensor.dtype.is_floating:
        # The derivative depends on the values, so TensorFlow scales them and differentiates that.
        tensor = tensor if pre == 1 else tensor * tf.cast(pre, tensor.dtype)
        pre, post, factor = 1.0, 1.0, post
    to_send, context = compressor.compress(tensor)
    coded = coding if tensor.dtype.is_floating else None
    return _Prepared(to_send, compressor, context, op, pre, post, factor, coded)


def names_and_group(
    kind: str, name: str | None, count: int, *, grouped: bool
) -> tuple[list[str], ops.Group | None]:
    """Return the names of a call's operations, and the group that they form."""
    text = full_name(kind, name)
    if not grouped:
        return [text], None
    return (ops.member_names(text, count) if text else [""] * count), ops.Group(text, count)


def reduce_all(
    kind: str,
    tensors: Sequence[tf.Tensor],
    reduction: Reduction,
    name: str | None,
    *,
    grouped: bool,
) -> list[tf.Tensor]:
    """Reduce tensors by an ``allreduce`` or a ``reducescatter``, in one operation."""
    names, group = names_and_group(kind, name, len(tensors), grouped=grouped)
    lasting = bool(names[0])
    coding = coding_for(replace(reduction, lasting=lasting))
    prepared = [_prepare(t, reduction, coding) for t in tensors]
    operations = [
        ops.operation(
            kind,
            text,
            reduction.process_set,
            op=p.op,
            prescale=p.prescale,
            postscale=p.postscale,
            coding=p.coding,
            lasting=lasting,
            check_finite=p.coding is not None,
            group=group,
        )
        for p, text in zip(prepared, names, strict=True)
    ]
    made = run(f"qsgd_{kind}", operations, tensors=[p.to_send for p in prepared])
    return [p.finish(reduced) for p, reduced in zip(prepared, made, strict=True)]
