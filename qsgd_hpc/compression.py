"""What to compress and how: decisions that no framework is needed for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from qsgd_hpc import env
from qsgd_hpc.errors import UsageError

__all__ = ["Coding", "Qsgd", "from_environment"]

Coding = tuple[int, int, str]
"""Bits, bucket size, norm: what the core takes."""

BUCKET_MULTIPLE = 64
MAX_BUCKET = 1 << 16


@dataclass(frozen=True)
class Qsgd:
    """QSGD stochastic quantisation of gradients (Alistarh et al., NeurIPS 2017).

    Args:
        bits: bits per element on the wire, sign included: 2, 4 or 8.
        bucket_size: elements that share one norm; a multiple of 64, up to 65536.
        norm: ``"max"`` (least error) or ``"l2"`` (the paper's).
        min_elements: smaller gradients travel as float32, as do those with one dimension
            (biases, norms), which are few and sensitive.
    Raises:
        UsageError: a value out of range.
    """

    bits: int = 4
    bucket_size: int = field(default_factory=lambda: env.get("QSGD_BUCKET_SIZE"))
    norm: str = field(default_factory=lambda: env.get("QSGD_NORM"))
    min_elements: int = field(default_factory=lambda: env.get("QSGD_MIN_ELEMENTS"))

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or self.bits not in (2, 4, 8):
            raise UsageError(f"qsgd(bits={self.bits!r}): choose 2, 4 or 8")
        size = self.bucket_size
        if not isinstance(size, int) or not 0 < size <= MAX_BUCKET or size % BUCKET_MULTIPLE:
            raise UsageError(
                f"qsgd(bucket_size={size!r}): choose a multiple of {BUCKET_MULTIPLE} "
                f"up to {MAX_BUCKET}"
            )
        if self.norm not in ("max", "l2"):
            raise UsageError(f"qsgd(norm={self.norm!r}): choose 'max' or 'l2'")

    def coding_for_gradient(self, shape: Sequence[int], dtype: str) -> Coding | None:
        """Return how to code a gradient, or None where it travels as it is."""
        if dtype != "float32" or len(shape) < 2 or math.prod(shape) < self.min_elements:
            return None
        return self.coding()

    def coding(self) -> Coding:
        """Return what the core takes."""
        return self.bits, self.bucket_size, self.norm


def from_environment() -> Qsgd | None:
    """Return what QSGD_BITS asks for, or None when it is unset or 32."""
    bits = env.get("QSGD_BITS")
    return None if bits in (None, 32) else Qsgd(bits=bits)
