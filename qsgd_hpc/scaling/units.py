"""Numbers as text: the same in the terminal, Markdown, HTML and plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from qsgd_hpc.jobs.words import plural as count

__all__ = [
    "accuracy",
    "bandwidth",
    "bits_name",
    "bound",
    "bytes_short",
    "capitalised",
    "count",
    "duration",
    "fewer",
    "hours",
    "interval",
    "nmse",
    "nodes_name",
    "percent",
    "points",
    "quality",
    "quality_gap",
    "quality_name",
    "rate",
    "sample",
    "seconds",
    "sends_fewer",
    "share",
    "span",
    "speed",
    "times",
]

MISSING = "–"


def speed(value: float | None) -> str:
    """A throughput to three digits, such as '1,340' or '28.1'; rate() adds the unit."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rate(value: float | None, unit: str) -> str:
    """A throughput with its unit, such as '1,340 images/s'."""
    return MISSING if value is None else f"{speed(value)} {unit}/s"


def sample(unit: str) -> str:
    """The unit of a batch for a unit of throughput: a batch of words is counted in sequences."""
    return {"words": "sequences", "steps": "samples"}.get(unit, unit)


def capitalised(text: str) -> str:
    """A text with a capital first letter and all other letters unchanged: 'Images'."""
    return text[:1].upper() + text[1:]


def interval(low: float | None, high: float | None) -> str:
    """A 95 % interval of factors, such as '1.21 to 1.35'; empty if there is none."""
    return "" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def span(values: Sequence[Any], form: Callable[[Any], str]) -> str:
    """The common value, or the range from least to most: '37', '0 to 37'."""
    return " to ".join(dict.fromkeys(form(end) for end in (min(values), max(values))))


def quality_name(column: str) -> str:
    """'Test accuracy' or 'Perplexity'."""
    return {"test_accuracy": "Test accuracy", "perplexity": "Perplexity"}[column]


def quality(column: str, value: float | None) -> str:
    """A quality as text: '98.80%' for an accuracy, '119.0' for a perplexity."""
    if value is None or column == "test_accuracy":
        return accuracy(value)
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def quality_gap(column: str, difference: float) -> str:
    """A difference of qualities: '−0.08 points' of accuracy, '+1.2' of perplexity."""
    if column == "test_accuracy":
        return points(difference)
    return f"{difference:+.2f}".replace("-", "−")


def times(value: float | None) -> str:
    """A factor, such as '1.87×'; two decimals below 10, then one."""
    if value is None:
        return MISSING
    return f"{value:.2f}×" if value < 9.95 else f"{value:.1f}×"


def fewer(ratio: float) -> str:
    """How many times fewer bytes, such as '7.88× fewer'; 'no fewer' if that rounds to 1 or less."""
    return f"{times(ratio)} fewer" if sends_fewer(ratio) else "no fewer"


def sends_fewer(ratio: float) -> bool:
    """Whether a ratio of bytes, as it is shown, says that there are fewer."""
    return ratio >= 1.005


def percent(value: float | None) -> str:
    """A share of 1 as whole per cent; below 1 % with a decimal."""
    if value is None:
        return MISSING
    return f"{100 * value:.1f}%" if 0 < value < 0.00995 else f"{100 * value:.0f}%"


def bound(value: float) -> str:
    """An upper bound of a share of 1 as whole per cent: rounded up, and at least 1%."""
    return f"{max(1, math.ceil(100 * value - 1e-9))}%"


def nmse(value: float | None) -> str:
    """An error of a code to two digits, such as '0.036' or '0.00011', and never '1.1e-04'."""
    return MISSING if value is None else format(Decimal(f"{value:#.2g}"), "f")


def share(value: float | None) -> str:
    """A share of 1 as per cent to two digits, however small: '3.6%', '0.011%'."""
    return MISSING if value is None else f"{nmse(100 * value)}%"


def accuracy(value: float | None) -> str:
    """An accuracy of 0..1 as per cent with two decimals: differences of 0.1 points matter."""
    return MISSING if value is None else f"{100 * value:.2f}%"


def bytes_short(value: float | None) -> str:
    """Bytes to three digits with a decimal unit (1 MB = 10^6 bytes), such as '428 kB'."""
    if value is None:
        return MISSING
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    digits = 0 if units[0] == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f} {units[0]}"


def seconds(value: float | None) -> str:
    """A short time to three digits: '740 µs', '12.3 ms', '1.87 s'; as duration() from a minute."""
    if value is None:
        return MISSING
    if value >= 60:
        return duration(value)
    if value < 0.9995e-3:
        return f"{1e6 * value:.3g} µs"
    return f"{1e3 * value:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def duration(seconds: float) -> str:
    """Seconds as '42 s', '3 min 05 s' or '2 h 10 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def hours(node_hours: float) -> str:
    """Node-hours to three digits, such as '0.25 node-hours'."""
    return f"{node_hours:,.0f} node-hours" if node_hours >= 100 else f"{node_hours:.3g} node-hours"


def points(difference: float) -> str:
    """A difference of accuracies of 0..1 in percentage points, such as '−0.08 points'."""
    text = f"{100 * difference:+.2f}"
    return ("±0.00" if text in {"+0.00", "-0.00"} else text.replace("-", "−")) + " points"


def bandwidth(value: float | None) -> str:
    """Bytes per second to three digits, such as '1.25 GB/s'."""
    return MISSING if value is None else f"{bytes_short(value)}/s"


def bits_name(bits: int) -> str:
    """'fp32' for plain float32, else '4 bit'."""
    return "fp32" if bits == 32 else f"{bits} bit"


def nodes_name(nodes: int) -> str:
    """'1 node', '2 nodes'."""
    return count(nodes, "node")
