"""Error of each reduction from the error of a code, for unbiased codes of uncorrelated gradients.

Each function takes w, the squared error of a code over the squared magnitude of its input, and the
number of ranks, and returns the squared error of the sum over its squared magnitude (NMSE). Errors
of an input are coded, too, which gives the products.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["FORMULAS"]


def allgather(w: float, ranks: int) -> float:
    """Every rank sends its codes to all, which sum them: one coding, so the error is w."""
    return w


def sra(w: float, ranks: int) -> float:
    """An owner adds its own uncoded share to the others' codes, and codes the sum: about 2w."""
    received = w * (ranks - 1) / ranks
    return received + w * (1 + received)


def sra2d(w: float, ranks: int) -> float:
    """Sum over rows, then over columns, then code the sum for all: about 3w."""
    rows = max(d for d in range(1, int(ranks**0.5) + 1) if ranks % d == 0)
    if rows == 1:
        return sra(w, ranks)
    in_row = w * (1 - rows / ranks)
    in_column = w * (1 - 1 / rows) * (1 + in_row)
    return in_row + in_column + w * (1 + in_row + in_column)


def requantizing_ring(w: float, ranks: int) -> float:
    """Each hop codes the sum of k shares and the errors so far: about w (p + 1) / 2."""
    error = 0.0
    for shares in range(1, ranks + 1):
        error += w * (shares + error)
    return error / ranks


FORMULAS: dict[str, Callable[[float, int], float]] = {
    "allgather": allgather,
    "sra": sra,
    "sra2d": sra2d,
    "requantizing_ring": requantizing_ring,
}
"""Formulas by the name of the algorithm, as in ``QSGD_ALGORITHM``."""
