"""Least squares with non-negative coefficients, and intervals from profiles of its residual.

The interval of a quantity holds the values at which the best fit of everything else has a sum of
squares of at most best * (1 + F(1, freedom) / freedom): Bates and Watts, Nonlinear Regression
Analysis, 1988, chapter 6. For models that are linear once the quantity is held this is exact for
normal noise, also for ratios of coefficients and at bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from qsgd_hpc.scaling.analysis.stats import LEVEL, Interval

__all__ = ["ROUNDING", "nonnegative", "profile_interval"]

Array = npt.NDArray[Any]

# A mean of squared relative residuals as small as this is rounding.
ROUNDING = 1e-20


def nonnegative(columns: Array, target: Array | None = None) -> tuple[Array, float]:
    """Return the coefficients >= 0 of the best fit to a target (ones), and its sum of squares.

    Args:
        columns: shape (rows, coefficients), none of them all zeros.
        target: shape (rows,).
    """
    # Scaled, because a model's columns can be magnitudes apart.
    scale = np.linalg.norm(columns, axis=0)
    wanted = np.ones(len(columns)) if target is None else target
    best, residual = optimize.nnls(columns / scale, wanted)
    return best / scale, float(residual) ** 2


def profile_interval(
    residual_at: Callable[[float], float],
    best: float,
    residual: float,
    *,
    rows: int,
    coefficients: int,
    upper: float | None,
) -> Interval | None:
    """Return the 95 % interval of a quantity in [0, upper]; None without spare rows.

    Args:
        residual_at: sum of squares of the best fit in which the quantity is held at a value.
        best, residual: its best value, and the sum of squares there.
        upper: its largest possible value; None where there is none.
    """
    freedom = rows - coefficients
    if freedom < 1:
        return None
    limit = residual * (1 + float(special.fdtri(1, freedom, LEVEL)) / freedom) + ROUNDING * rows

    def excess(held: float) -> float:
        return residual_at(held) - limit

    top = _outside(excess, best) if upper is None else upper
    return _crossing(excess, best, 0.0), _crossing(excess, best, top)


def _outside(excess: Callable[[float], float], best: float) -> float:
    """Return a value above the interval; the search ends at 10^18 times the start."""
    step = max(best, 1e-15)
    for _ in range(60):
        if excess(best + step) > 0:
            break
        step *= 2
    return best + step


def _crossing(excess: Callable[[float], float], inside: float, bound: float) -> float:
    if inside == bound or excess(bound) <= 0:
        return bound
    if excess(inside) >= 0:  # a fit that is exact but for rounding
        return inside
    tolerance = 1e-9 * max(abs(inside), abs(bound))
    return float(optimize.brentq(excess, inside, bound, xtol=tolerance, rtol=1e-9))
