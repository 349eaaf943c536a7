"""The kernel that copies, scales and looks at tensors, beside the same on the host."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.twin import SCALED, Kernels

COUNTS = (1, 5, 0, SCALED, SCALED + 1, 3 * SCALED - 7)


def arrays(dtype: str, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return [draw.standard_normal(count).astype(dtype) for count in COUNTS]
    return [draw.integers(0, 100, count).astype(dtype) for count in COUNTS]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("factor", "divisor"), [(1.0, 1), (0.3, 1), (1.0, 3), (2.0, 6)])
def test_floats_are_multiplied_by_the_quotient(kernels: Kernels, dtype, factor, divisor):
    xs = arrays(dtype)
    to = [np.full_like(x, 7) for x in xs]
    assert not any(kernels.scale(xs, to, factor, divisor))
    wide = np.float64 if dtype == "float64" else np.float32
    by = wide(factor / divisor)
    for x, scaled in zip(xs, to, strict=True):
        np.testing.assert_array_equal(scaled, (x.astype(wide) * by).astype(dtype))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64"])
def test_integers_divide_first_and_round_towards_zero(kernels: Kernels, dtype):
    xs = arrays(dtype)
    if dtype != "uint8":
        xs = [-x for x in xs]
    to = [np.zeros_like(x) for x in xs]
    assert not any(kernels.scale(xs, to, 0.5, 3))
    for x, scaled in zip(xs, to, strict=True):
        part = np.trunc(x / 3)
        np.testing.assert_array_equal(scaled, np.trunc(part * 0.5).astype(dtype))


def test_bfloat16_is_rounded_to_the_nearest_even(kernels: Kernels):
    x = (arrays("float32")[-1].view(np.uint32) >> 16).astype(np.uint16)
    to = np.zeros_like(x)
    kernels.scale([x], [to], 0.3, dtype="bfloat16")
    bits = ((x.astype(np.uint32) << 16).view(np.float32) * np.float32(0.3)).view(np.uint32)
    np.testing.assert_array_equal(to, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("writes", [True, False])
def test_those_that_are_not_finite_are_named(kernels: Kernels, dtype, bad, writes):
    xs = arrays(dtype)
    xs[3][SCALED - 1] = xs[5][2 * SCALED + 1] = bad
    to = [np.zeros_like(x) for x in xs] if writes else None
    assert kernels.scale(xs, to) == [False, False, False, True, False, True]
    if to is not None:
        np.testing.assert_array_equal(to[3], xs[3])


def test_an_overflow_is_one_of_the_result(kernels: Kernels):
    xs = [np.full(10, 6e4, dtype=np.float16), np.ones(10, dtype=np.float16)]
    assert kernels.scale(xs, [x.copy() for x in xs], 2.0) == [True, False]


def test_in_place(kernels: Kernels):
    x = arrays("float32")[-1]
    expected = x * np.float32(0.25)
    kernels.scale([x], [x], 0.25)
    np.testing.assert_array_equal(x, expected)
