"""Medians of repeats and their 95 % intervals; the results are deterministic.

Two methods, because few repeats and many need different ones (Hoefler and Belli, Scientific
benchmarking of parallel computing systems, SC'15, rules 5 to 7):

- 6 repeats or more: of a median, the interval between two of the values, which assumes nothing
  about the noise: the number of values below the true median is binomial (Le Boudec, Performance
  Evaluation of Computer and Communication Systems, 2010, theorem 2.1). Of a ratio of medians, the
  percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).
- 2 to 5 repeats: Student's t. The range of so few values holds the true median with probability
  1 - 2^(1-n) only: 50, 75, 87.5 and 93.75 %. Student's interval is wider, and holds the median with
  probability 95 % if the noise is symmetric.
- 1 repeat: none. The steps within a run do not replace repeats: what differs from run to run, such
  as placement and other users, is constant within one (Kalibera and Jones, Rigorous benchmarking in
  reasonable time, ISMM 2013), so an interval of them would be far too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

__all__ = [
    "LEVEL",
    "ORDERED_FROM",
    "Interval",
    "enough",
    "interval",
    "proportion_bound",
    "ratio_interval",
    "repeats_bound",
    "sample_variance",
]

LEVEL = 0.95
# The fewest repeats whose range holds the true median with a probability of 95 %.
ORDERED_FROM = 6
_DRAWS = 4000
_SEED = 20171204  # arbitrary but fixed, so that a recomputed report has the same bytes

# Standard errors by which a difference must exceed its bound to be found in four of five studies.
_POWER = 0.84

Interval = tuple[float, float]
Values = Sequence[float] | npt.NDArray[Any]


def interval(values: Values, *, relative: bool) -> Interval | None:
    """Return the 95 % interval of the median of repeats; None for fewer than 2.

    Args:
        values: one finite number per repeat.
        relative: the noise is multiplicative (speeds, times: all above 0), so Student's t is taken
            of logarithms; otherwise it is additive (shares, accuracies).
    """
    data = np.asarray(values, dtype=float)
    if len(data) < 2:
        return None
    if len(data) >= ORDERED_FROM:
        ordered, below = np.sort(data), special.bdtr(range(len(data)), len(data), 0.5)
        outside = int((below <= (1 - LEVEL) / 2).sum())
        return float(ordered[outside - 1]), float(ordered[-outside])
    if relative and not (data > 0).all():
        return None
    low, high = _student(np.log(data) if relative else data)
    return (float(np.exp(low)), float(np.exp(high))) if relative else (low, high)


def ratio_interval(top: Values, base: Values) -> Interval | None:
    """Return the 95 % interval of median(top) / median(base); None if either has 1 repeat.

    All values are above 0. With 6 or more repeats of each, the bootstrap of the ratio, both
    resampled; else Welch's t of the logarithms (Welch, Biometrika 1947), which allows for different
    noise of the two.
    """
    above, below = np.asarray(top, dtype=float), np.asarray(base, dtype=float)
    if min(len(above), len(below)) < 2:
        return None
    if min(len(above), len(below)) >= ORDERED_FROM:
        draw = np.random.default_rng(_SEED)
        tail = 50 * (1 - LEVEL)
        draws = _medians(above, draw) / _medians(below, draw)
        low, high = np.percentile(draws, [tail, 100 - tail])
        return float(low), float(high)
    logs = np.log(above), np.log(below)
    difference, half = float(logs[0].mean() - logs[1].mean()), _welch(*logs, 1 - LEVEL)
    return float(np.exp(difference - half)), float(np.exp(difference + half))


def repeats_bound(top: Values, base: Values, *, comparisons: int) -> float | None:
    """Return how far the means of equal trainings differ by chance, from the spread of repeats.

    Welch's t at 5 % for all comparisons together (Bonferroni). None where either has 1 repeat, or
    all repeats have the same value: the same seed gives the same training, which shows no noise.
    """
    above, below = np.asarray(top, dtype=float), np.asarray(base, dtype=float)
    if min(len(np.unique(above)), len(np.unique(below))) < 2:
        return None
    return _welch(above, below, (1 - LEVEL) / comparisons)


def proportion_bound(top: float, base: float, *, samples: int, comparisons: int) -> float:
    """Return how far two equal accuracies differ by chance, because the test set is finite.

    The normal bound of a difference of two proportions at 5 % for all comparisons together. A
    success and a failure are added to each (Agresti and Caffo, The American Statistician 2000), so
    that 100 % on a few samples is not taken as certain. The bound assumes two test sets. In fact
    both trainings are tested on the same samples and fail on many of the same ones, so the true
    bound is smaller: this one may miss a difference, but does not invent one.
    """
    variance = sum(sample_variance(share, samples) for share in (top, base))
    return _normal((1 - LEVEL) / comparisons) * math.sqrt(variance / samples)


def sample_variance(share: float, samples: int) -> float:
    """Return the variance of one sample's success, estimated from the share of `samples`."""
    adjusted = (min(max(share, 0.0), 1.0) * samples + 1) / (samples + 2)
    return adjusted * (1 - adjusted) * samples / (samples + 2)


def enough(variance: float, difference: float, *, comparisons: int) -> int:
    """Return how many runs or samples of each kind show a difference of means (power 80 %).

    Args:
        variance: of one run (or sample) of the first kind plus that of one of the second.
        difference: of the means.
        comparisons: number of comparisons that share the level of 5 %.
    """
    reach = _normal((1 - LEVEL) / comparisons) + _POWER
    return math.ceil(variance * (reach / difference) ** 2)


def _welch(above: npt.NDArray[Any], below: npt.NDArray[Any], level: float) -> float:
    """Return the half-width of Welch's interval of the difference of two means."""
    parts = [(float(np.var(x, ddof=1)) / len(x), len(x) - 1) for x in (above, below)]
    total = sum(part for part, _ in parts)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(part**2 / free for part, free in parts)
    return float(special.stdtrit(freedom, 1 - level / 2)) * math.sqrt(total)


def _normal(level: float) -> float:
    return float(special.ndtri(1 - level / 2))


def _student(data: npt.NDArray[Any]) -> Interval:
    half = float(special.stdtrit(len(data) - 1, (1 + LEVEL) / 2)) * float(data.std(ddof=1))
    half /= len(data) ** 0.5
    middle = float(data.mean())
    return middle - half, middle + half


def _medians(data: npt.NDArray[Any], draw: np.random.Generator) -> npt.NDArray[Any]:
    medians: npt.NDArray[Any] = np.median(
        data[draw.integers(0, len(data), (_DRAWS, len(data)))], axis=1
    )
    return medians
