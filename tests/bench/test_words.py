"""Sizes, bits and numbers as users of ``qsgd-hpc bench`` write and read them."""

from __future__ import annotations

import pytest

from qsgd_hpc import _core
from qsgd_hpc.bench import words
from qsgd_hpc.errors import UsageError

K, M = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4K:64K", [4 * K, 16 * K, 64 * K]),
        ("4K:32K", [4 * K, 16 * K, 32 * K]),
        ("4K:32K:2", [4 * K, 8 * K, 16 * K, 32 * K]),
        ("1M:1M", [M]),
        ("100M", [100 * M]),
        ("1m,64kib,1M", [64 * K, M]),
        ("4,8B", [4, 8]),
    ],
)
def test_sizes_are_ranges_or_lists(text, sizes):
    assert words.parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4Q", "'4Q'"),
        ("", "''"),
        ("4K:", "''"),
        ("6", "multiple of 4"),
        ("0", "multiple of 4"),
        ("-4K", "'-4K'"),
        ("64K:4K", "swap"),
        ("4K:64K:1", "at least 2"),
        ("4K:64K:x", "at least 2"),
        ("1:2:3:4", "FROM:TO"),
        ("32G", "at most 16 G"),
    ],
)
def test_other_sizes_are_refused_with_what_is_wrong(text, said):
    with pytest.raises(UsageError, match="size") as error:
        words.parse_sizes(text)
    assert said in str(error.value)


def test_bits_keep_their_order_and_are_named_once():
    assert words.parse_bits("32,8,3,8,auto") == [32, 8, 3, "auto"]


@pytest.mark.parametrize("text", ["9", "0", "16", "", "4,x", "-4", "4.0"])
def test_other_bits_are_refused(text):
    with pytest.raises(UsageError, match="1 to 8, 32"):
        words.parse_bits(text)


def test_specs_are_what_the_core_takes():
    specs = words.parse_specs("qsgd,minmax,terngrad,topk", "8,1", "max,l2")
    assert specs == [
        {"scheme": "qsgd", "bits": 8, "norm": "max"},
        {"scheme": "qsgd", "bits": 8, "norm": "l2"},
        {"scheme": "sign"},
        {"scheme": "minmax", "bits": 8},
        {"scheme": "minmax", "bits": 1},
        {"scheme": "terngrad"},
        {"scheme": "topk", "k": 8},
    ]
    for spec in specs:
        assert _core.CodecSpec(**spec).bytes(1024) > 0
    with pytest.raises(UsageError, match=r"'32' is not 1 to 8$"):
        words.parse_specs("qsgd", "32", "max")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        *((4, "4"), (1023, "1023"), (64 * K, "64 K"), (1100, "1.07 K"), (1020 * K, "1020 K")),
        *((100 * M, "100 M"), (3 << 30, "3 G"), (5 << 40, "5120 G")),
    ],
)
def test_sizes_have_three_digits(size_bytes, text):
    assert words.size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234e-6, "1.23 us"),
        (999.4e-6, "999 us"),
        (999.6e-6, "1 ms"),
        (0.5, "500 ms"),
        (12, "12 s"),
    ],
)
def test_times_have_three_digits(seconds, text):
    assert words.time_text(seconds) == text


def test_rates_are_never_powers_of_ten():
    assert [words.rate_text(x) for x in (0.0123, 1.234, 123.4)] == ["0.012", "1.23", "123.4"]
