"""Intervals of repeats hold the truth as often as they say, and are the same each time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsgd_hpc.scaling.analysis.stats import interval, ratio_interval

TRIALS = 300
# A method of 95 % misses 15 of 300; more than 27 with probability 0.2 % (binomial).
MISSES = 27


def test_one_repeat_has_no_interval():
    assert interval([3.0], relative=True) is None
    assert ratio_interval([3.0], [2.0, 2.1]) is None


@pytest.mark.parametrize("repeats", [2, 3, 4, 5, 6, 7, 8, 9])
def test_an_interval_misses_the_median_in_one_of_twenty(repeats):
    draw = np.random.default_rng(repeats)
    misses = 0
    for _ in range(TRIALS):
        low, high = interval(100 * np.exp(0.1 * draw.standard_normal(repeats)), relative=True)
        misses += not low <= 100 <= high
    assert misses <= MISSES


@pytest.mark.parametrize(("top", "base"), [(2, 2), (3, 3), (3, 5), (6, 6)])
def test_pure_noise_is_called_a_difference_in_one_of_twenty(top, base):
    draw = np.random.default_rng(top)
    claims = 0
    for _ in range(TRIALS):
        low, high = ratio_interval(
            np.exp(0.1 * draw.standard_normal(top)), np.exp(0.1 * draw.standard_normal(base))
        )
        claims += not low <= 1 <= high
    assert claims <= MISSES


speeds = st.lists(st.floats(1.0, 1e6), min_size=2, max_size=8)


@settings(max_examples=60, deadline=None)
@given(speeds)
def test_an_interval_holds_the_median_and_is_deterministic(values):
    low, high = interval(values, relative=True)
    slack = 1e-9 * max(values)
    assert low - slack <= float(np.median(values)) <= high + slack
    assert (low, high) == interval(values, relative=True)


@settings(max_examples=60, deadline=None)
@given(speeds, st.floats(0.1, 10))
def test_an_interval_scales_with_its_values(values, factor):
    scaled = interval([factor * v for v in values], relative=True)
    expected = tuple(factor * bound for bound in interval(values, relative=True))
    assert scaled == pytest.approx(expected, rel=1e-6)


def test_repeats_that_agree_have_an_interval_of_no_width():
    assert interval([0.5, 0.5, 0.5], relative=False) == (0.5, 0.5)
    assert ratio_interval([2.0, 2.0], [1.0, 1.0]) == pytest.approx((2.0, 2.0))
